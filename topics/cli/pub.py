"""`topics pub`: writes what it is given, as arguments or as lines."""

from __future__ import annotations

import base64
import binascii
import functools
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import IO, Any

import click
import msgspec
from msgspec import Raw

from topics.cli.advice import advice_of
from topics.cli.failures import FAILED, OK, UNKNOWN, UNREACHABLE, Failed
from topics.cli.session import Session, as_plain, topic_argument, with_server
from topics.cli.tables import as_bytes
from topics.client import ApiError, ClientError, Disconnected, NewRecord
from topics.client.producer import Producer, Receipt

AT_ONCE_MAX = 10_000  # what one write takes
IN_HAND_MAX = 100_000  # receipts that are not looked at yet
TOLD_MAX = 10
PROGRESS_S = 0.2


def meta_of(text: str) -> dict[str, Any]:
    """KEY=VALUE, or a JSON object."""
    if not text.startswith("{"):
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise click.BadParameter(f"{text!r} is not KEY=VALUE, nor a JSON object")
        return {key: value}
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise click.BadParameter(f"{text!r} is not a JSON object: {error}") from None


@click.command()
@topic_argument
@click.argument("data", nargs=-1)
@click.option("--tag", help="Tag of every record that has none of its own.")
@click.option("--meta", "metas", type=meta_of, multiple=True, metavar="KEY=VALUE|OBJECT", help="Meta of every record that has none of its own: KEY=VALUE, a text, or a JSON object. May be given several times.")  # fmt: skip
@click.option("--text", "is_text", is_flag=True, help="Each DATA or line is plain text, not JSON.")
@click.option("--records", "is_records", is_flag=True, help="Each DATA or line is a record with data, and optionally tag, node, meta, ttl_ms, as `topics read --json` prints it.")  # fmt: skip
@click.option("--at-once", is_flag=True, help="Write all lines or none, in one write of at most 10000.")
@with_server
def pub(
    session: Session,
    topic: str,
    data: tuple[str, ...],
    tag: str | None,
    metas: tuple[dict[str, Any], ...],
    is_text: bool,
    is_records: bool,
    at_once: bool,
) -> int:
    """Write records to a topic. Each DATA is a JSON value; all are written or none. Without DATA, the lines of stdin are.

    Lines are written in batches while they come, each exactly once. One that the server refuses is reported and
    left out; the exit code is then 1.
    """
    if is_text and is_records:
        raise click.UsageError("give only one of --text and --records")
    meta = {key: value for given in metas for key, value in given.items()} or None
    take = functools.partial(record_of, tag=tag, meta=meta, is_text=is_text, is_records=is_records)
    if data:
        records = [take(text.encode(), f"argument {i}") for i, text in enumerate(data, 1)]
        return write_at_once(session, topic, records)
    if sys.stdin.isatty():
        session.say("reading JSON values from the terminal, one a line; Ctrl-D ends it")
    lines = ((number, take(line, f"line {number}")) for number, line in numbered(sys.stdin.buffer))
    if at_once:
        records = []
        for number, record in lines:
            if number > AT_ONCE_MAX:
                raise Failed(f"one write takes {AT_ONCE_MAX} records at most: leave --at-once out")
            records.append(record)
        if records:
            return write_at_once(session, topic, records)
    return Stream(session, topic).run(lines)


def numbered(stream: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """Lines that are not empty."""
    for number, line in enumerate(stream, 1):
        line = line.strip(b"\r\n")
        if line.strip():
            yield number, line


class _Line(msgspec.Struct):
    """A record as it is given, or as `topics read --json` prints it."""

    data: Raw = Raw(b"null")
    tag: str | None = None
    node: str | None = None
    meta: dict[str, Any] | None = None
    ttl_ms: int = 0
    read_tag: str | None = msgspec.field(name="$tag", default=None)
    read_node: str | None = msgspec.field(name="$node", default=None)
    encoding: str | None = msgspec.field(name="$encoding", default=None)


_decode_line = msgspec.json.Decoder(_Line).decode
_decode_text = msgspec.json.Decoder(str).decode
_decode_any = msgspec.json.Decoder().decode


def record_of(
    text: bytes,
    where: str,
    *,
    tag: str | None,
    meta: dict[str, Any] | None,
    is_text: bool,
    is_records: bool,
) -> NewRecord:
    """ValueError is told as what is wrong with the line."""
    try:
        if is_text:
            return NewRecord(text.decode(), tag=tag, meta=meta)
        if not is_records:
            _decode_any(text)
            return NewRecord(Raw(text), tag=tag, meta=meta)
        line = _decode_line(text)
        data: Any = line.data.copy()
        if line.encoding == "base64":
            data = base64.b64decode(_decode_text(data), validate=True)
        else:
            _decode_any(data)
    except (msgspec.DecodeError, UnicodeDecodeError, binascii.Error, RecursionError) as error:
        advice = "" if is_text or is_records else ". Quote texts as JSON does, or use --text"
        raise Failed(
            f"{where} is not {'a record' if is_records else 'valid JSON'}: {error}{advice}"
        ) from error
    return NewRecord(
        data, line.tag or line.read_tag or tag, line.node or line.read_node, line.meta or meta, line.ttl_ms
    )


def write_at_once(session: Session, topic: str, records: list[NewRecord]) -> int:
    written = session.client.write_many(topic, records)
    seqs = (
        f"seq {written.first_seq}"
        if written.count == 1
        else f"seqs {written.first_seq} to {written.last_seq}"
    )
    told = as_plain(written)
    del told["seqs"]  # not asked for: they are those from the first to the last
    session.one(told, f"{topic}: {seqs}")
    return OK


class Stream:
    """Lines on their way: those that are written, and those that are not."""

    def __init__(self, session: Session, topic: str) -> None:
        self._session, self._topic = session, topic
        self._waiting: deque[tuple[int, Receipt]] = deque()
        self._written = self._failed = self._bytes = 0
        self._first_seq = self._last_seq = 0
        self._is_unknown = False
        self._is_refused = False  # a failure other than that the server is away
        self._begun = time.monotonic()
        self._next_progress = 0.0

    def run(self, lines: Iterable[tuple[int, NewRecord]]) -> int:
        self._knock()
        producer = self._session.client.producer(self._topic)
        wrong: Failed | KeyboardInterrupt | None = None
        try:
            try:
                self._send(producer, lines)
            finally:
                _close(producer)
        except (Failed, KeyboardInterrupt) as error:
            # A line that is none, or Ctrl-C, perhaps in the middle of closing: those before it are written.
            wrong = error
            _close(producer)
        self._settle(len(self._waiting))
        self._progress(is_end=True)
        self._tell()
        if isinstance(wrong, KeyboardInterrupt):
            raise wrong
        if wrong is not None:
            raise Failed(f"{wrong.message}. The lines before it are written, and none after it")
        if self._is_unknown:
            return UNKNOWN
        if not self._failed:
            return OK
        return FAILED if self._is_refused else UNREACHABLE

    def _send(self, producer: Producer, lines: Iterable[tuple[int, NewRecord]]) -> None:
        for number, record in lines:
            receipt = producer.send(
                record.data, tag=record.tag, node=record.node, meta=record.meta, ttl_ms=record.ttl_ms
            )
            self._bytes += len(record.data)
            self._waiting.append((number, receipt))
            self._settle(0 if len(self._waiting) < IN_HAND_MAX else IN_HAND_MAX // 2)
            self._progress()

    def _knock(self) -> None:
        """A producer tries for a minute. A wrong address is reported before that."""
        if self._session.is_patient:
            return
        try:
            self._session.client.health()
        except ApiError:
            pass  # it is there

    def _settle(self, wait_for: int) -> None:
        """Look at receipts from the front: those that are done, and so many besides."""
        while self._waiting and (wait_for > 0 or self._waiting[0][1].done()):
            number, receipt = self._waiting.popleft()
            wait_for -= 1
            try:
                self._last_seq = receipt.result()
            except ClientError as error:
                self._failed += 1
                self._is_unknown |= error.outcome == "unknown"
                self._is_refused |= not isinstance(error, Disconnected)
                if self._failed <= TOLD_MAX:
                    self._session.say(f"line {number}: {error}. {advice_of(error)}".rstrip(". "))
                elif self._failed == TOLD_MAX + 1:
                    self._session.say("and more lines")
            else:
                self._written += 1
                self._first_seq = self._first_seq or self._last_seq

    def _progress(self, *, is_end: bool = False) -> None:
        if not sys.stderr.isatty():
            return
        now = time.monotonic()
        if is_end:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
        elif now >= self._next_progress:
            self._next_progress = now + PROGRESS_S
            rate = self._written / max(0.001, now - self._begun)
            text = f"{self._written} records, {as_bytes(self._bytes)}, {rate:.0f}/s"
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)

    def _tell(self) -> None:
        found = {
            "topic": self._topic,
            "written": self._written,
            "failed": self._failed,
            "first_seq": self._first_seq,
            "last_seq": self._last_seq,
        }
        told = f"{self._topic}: {self._written} record{'' if self._written == 1 else 's'} written"
        if self._written:
            told += f", up to seq {self._last_seq}"
        if self._failed:
            told += f"; {self._failed} failed"
        self._session.one(found, told)


def _close(producer: Producer) -> None:
    try:
        producer.close()
    except ClientError:
        pass  # each receipt says it
