"""`topics pub`: writes records given as arguments or as lines on stdin."""

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

from topics.cli.client_errors import advice_for
from topics.cli.errors import FAILED, OK, UNKNOWN, UNREACHABLE, CommandError
from topics.cli.formatting import format_size
from topics.cli.session import Session, as_plain, topic_argument, with_server
from topics.client import ApiError, ClientError, Disconnected, NewRecord
from topics.client.producer import Producer, Receipt

AT_ONCE_MAX = 10_000  # records of one write
PENDING_MAX = 100_000  # receipts that were not checked yet
REPORTED_MAX = 10
PROGRESS_S = 0.2


def meta_of(text: str) -> dict[str, Any]:
    """KEY=VALUE, or a JSON object."""
    if not text.startswith("{"):
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise click.BadParameter(f"{text!r} is neither KEY=VALUE nor a JSON object")
        return {key: value}
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise click.BadParameter(f"{text!r} is not a JSON object: {error}") from None


@click.command()
@topic_argument
@click.argument("data", nargs=-1)
@click.option("--tag", help="Tag for records without one.")
@click.option("--meta", "metas", type=meta_of, multiple=True, metavar="KEY=VALUE|OBJECT", help="Meta for records without any: KEY=VALUE (a string), or a JSON object. Repeatable.")  # fmt: skip
@click.option("--text", "is_text", is_flag=True, help="Each DATA or line is plain text, not JSON.")
@click.option("--records", "is_records", is_flag=True, help="Each DATA or line is a record as printed by `topics read --json`: data, and optionally tag, node, meta, ttl_ms.")  # fmt: skip
@click.option(
    "--at-once", is_flag=True, help="Write all lines or none, in one write of at most 10000 records."
)
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
    """Write records to a topic. Each DATA is a JSON value; all are written or none. Without DATA, writes the lines of stdin.

    Lines are written in batches as they arrive, each exactly once. Records that the server rejects are reported and
    skipped; the exit code is then 1.
    """
    if is_text and is_records:
        raise click.UsageError("give only one of --text and --records")
    meta = {key: value for given in metas for key, value in given.items()} or None
    take = functools.partial(record_of, tag=tag, meta=meta, is_text=is_text, is_records=is_records)
    if data:
        records = [take(text.encode(), f"argument {i}") for i, text in enumerate(data, 1)]
        return write_at_once(session, topic, records)
    if sys.stdin.isatty():
        session.note("reading JSON values from the terminal, one per line; Ctrl-D to finish")
    lines = ((number, take(line, f"line {number}")) for number, line in numbered(sys.stdin.buffer))
    if at_once:
        records = []
        for number, record in lines:
            if number > AT_ONCE_MAX:
                raise CommandError(f"--at-once accepts at most {AT_ONCE_MAX} records; omit it to write more")
            records.append(record)
        if records:
            return write_at_once(session, topic, records)
    return Stream(session, topic).run(lines)


def numbered(stream: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """Non-empty lines with their numbers."""
    for number, line in enumerate(stream, 1):
        line = line.strip(b"\r\n")
        if line.strip():
            yield number, line


class _Line(msgspec.Struct):
    """A line of --records: fields named as for a write, or as printed by `topics read --json`."""

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
    """Parse an argument or a line; `where` names it in error messages."""
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
        advice = "" if is_text or is_records else ". Quote strings as in JSON, or use --text"
        raise CommandError(
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
    result = as_plain(written)
    del result["seqs"]  # always first_seq to last_seq
    session.print_result(result, f"{topic}: {seqs}")
    return OK


class Stream:
    """Writes lines through a producer and counts successes and failures."""

    def __init__(self, session: Session, topic: str) -> None:
        self._session, self._topic = session, topic
        self._pending: deque[tuple[int, Receipt]] = deque()
        self._written = self._failed = self._bytes = 0
        self._first_seq = self._last_seq = 0
        self._is_unknown = False
        self._is_rejected = False  # a failure other than an unreachable server
        self._begun = time.monotonic()
        self._next_progress = 0.0

    def run(self, lines: Iterable[tuple[int, NewRecord]]) -> int:
        self._check_reachable()
        producer = self._session.client.producer(self._topic)
        stopped_by: CommandError | KeyboardInterrupt | None = None
        try:
            try:
                self._send(producer, lines)
            finally:
                _close(producer)
        except (CommandError, KeyboardInterrupt) as error:
            # An invalid line, or Ctrl-C, perhaps during close. Earlier lines are still written.
            stopped_by = error
            _close(producer)
        self._settle(len(self._pending))
        self._progress(is_end=True)
        self._print_summary()
        if isinstance(stopped_by, KeyboardInterrupt):
            raise stopped_by
        if stopped_by is not None:
            raise CommandError(f"{stopped_by.message}. Lines before it were written; lines after it were not")
        if self._is_unknown:
            return UNKNOWN
        if not self._failed:
            return OK
        return FAILED if self._is_rejected else UNREACHABLE

    def _send(self, producer: Producer, lines: Iterable[tuple[int, NewRecord]]) -> None:
        for number, record in lines:
            receipt = producer.send(
                record.data, tag=record.tag, node=record.node, meta=record.meta, ttl_ms=record.ttl_ms
            )
            self._bytes += len(record.data)
            self._pending.append((number, receipt))
            self._settle(0 if len(self._pending) < PENDING_MAX else PENDING_MAX // 2)
            self._progress()

    def _check_reachable(self) -> None:
        """Report a wrong address at once: a producer would retry for a minute first."""
        if self._session.has_retry:
            return
        try:
            self._session.client.health()
        except ApiError:
            pass  # it is reachable

    def _settle(self, wait_for: int) -> None:
        """Check receipts in order: all that are done, waiting for the first `wait_for`."""
        while self._pending and (wait_for > 0 or self._pending[0][1].done()):
            number, receipt = self._pending.popleft()
            wait_for -= 1
            try:
                self._last_seq = receipt.result()
            except ClientError as error:
                self._failed += 1
                self._is_unknown |= error.outcome == "unknown"
                self._is_rejected |= not isinstance(error, Disconnected)
                if self._failed <= REPORTED_MAX:
                    self._session.note(f"line {number}: {error}. {advice_for(error)}".rstrip(". "))
                elif self._failed == REPORTED_MAX + 1:
                    self._session.note("further failed lines are not listed")
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
            text = f"{self._written} records, {format_size(self._bytes)}, {rate:.0f}/s"
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)

    def _print_summary(self) -> None:
        result = {
            "topic": self._topic,
            "written": self._written,
            "failed": self._failed,
            "first_seq": self._first_seq,
            "last_seq": self._last_seq,
        }
        text = f"{self._topic}: {self._written} record{'' if self._written == 1 else 's'} written"
        if self._written:
            text += f", up to seq {self._last_seq}"
        if self._failed:
            text += f"; {self._failed} failed"
        self._session.print_result(result, text)


def _close(producer: Producer) -> None:
    try:
        producer.close()
    except ClientError:
        pass  # reported by the receipts
