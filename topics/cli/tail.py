"""`topics tail`: follows topics in the terminal, over restarts and broken connections, until it is told to stop."""

from __future__ import annotations

import argparse
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import BinaryIO, NoReturn, TextIO

import msgspec
from msgspec import Raw

from topics.cli import lines
from topics.cli.event_stream import Event, EventReader
from topics.cli.following import Following, Wanted
from topics.cli.server import DEFAULT_URL, Refused, Server, Unreachable
from topics.schemas import U64_MAX

OK, FAILED, UNREACHABLE, INTERRUPTED = 0, 1, 3, 128 + signal.SIGINT
FRAME_RECORDS_MAX = 1000

EPILOG = """\
A pattern names topics by their tokens between dots: `*` stands for one, a final `>` for one or more. Quote it.
Lines are `topic seq time data`; what was lost, and topics that were deleted, are told on stderr.

exit codes: 0 after --count, or when the reader of a pipe has gone; 1 refused, or nothing is left to follow;
2 wrong arguments; 3 the server cannot be reached at the start (later it is tried again for as long as it takes);
130 Ctrl-C
"""


class Stop(Exception):
    """The tail ends here, with this exit code."""

    def __init__(self, code: int, message: str = "") -> None:
        super().__init__(message)
        self.code = code


class _Records(msgspec.Struct):
    topic: str
    records: list[Raw]
    to_seq: int


class _Gap(msgspec.Struct):
    topic: str
    reason: str
    gap_from: int
    gap_to: int


class _CaughtUp(msgspec.Struct):
    topic: str
    head_seq: int


class _TopicDeleted(msgspec.Struct):
    topic: str


class _Error(msgspec.Struct):
    code: int | str
    message: str = ""


class Tail:
    """One command's work: `run` ends by raising Stop."""

    def __init__(
        self,
        server: Server,
        wanted: Wanted,
        form: lines.Format,
        out: BinaryIO,
        say: Callable[[str], None],
        count: int | None = None,
    ) -> None:
        self._server = server
        self._following = Following(wanted)
        self._form, self._out, self._say = form, out, say
        self._left = count
        self._reader = EventReader()
        self._why = ""  # the stream said that it ends
        self._is_out = False  # it was told that we do not follow just now
        self._is_new = False  # the session was not streamed from yet

    def run(self) -> NoReturn:
        following = self._following
        while not following.is_over:
            try:
                if following.stream_path is None:
                    self._begin()
                else:
                    self._follow(following.stream_path)
                    if not following.is_over:
                        self._pause(self._why or "the connection broke")
            except Unreachable as error:
                if not following.has_begun:
                    raise Stop(UNREACHABLE, self._advice(str(error))) from error
                self._pause(str(error))
            except Refused as error:
                self._refused(error)
        raise Stop(FAILED, "nothing is left to follow")

    def _begin(self) -> None:
        again = self._following.has_begun
        # Who has begun wants the rest also when one of the topics was deleted meanwhile.
        path = "/v0/watch?lenient=true" if again else "/v0/watch"
        answer = self._server.post(path, self._following.body())
        try:
            beginning = self._following.begin(answer)
        except msgspec.DecodeError:
            raise Refused(200, "", "it does not answer like a topics server") from None
        self._reader.last_id = ""  # ids are those of the session
        self._is_new = True
        for topic in beginning.gone:
            self._say(f"{topic} was deleted")
        if beginning.unnamed:
            self._say(
                f"the server has forgotten this reader; {beginning.unnamed} topics go on with what comes now"
            )
        if not again:
            self._greet()

    def _greet(self) -> None:
        if sys.stderr.isatty():
            topics = self._following.topics
            what = (
                f"{topics} topic{'' if topics == 1 else 's'}" if topics else "no topic yet; waiting for one"
            )
            self._say(f"following {what}. Ctrl-C ends it")

    def _follow(self, path: str) -> None:
        reader, self._why = self._reader, ""
        reader.forget()
        with self._server.stream(path, reader.last_id) as stream:
            self._is_new = False
            if self._is_out:
                self._is_out = False
                self._say("following again")
            for line in stream:
                if line.startswith(b":"):
                    self._check_reader()
                event = reader.line(line)
                if event is not None:
                    self._take(event)
                    if self._following.is_over or self._following.stream_path is None:
                        return

    def _pause(self, why: str) -> None:
        """Until the next try."""
        self._check_reader()
        seconds = self._reader.retry_ms / 1000
        if not self._is_out:
            self._is_out = True
            self._say(f"{why} (trying again every {seconds:g} s)")
        time.sleep(seconds)

    def _refused(self, error: Refused) -> None:
        following = self._following
        if error.status == 404 and following.stream_path is not None:
            following.stream_path = None
            if self._is_new:  # a server that forgets at once is not asked without a pause
                self._pause(str(error))
        elif error.status in (502, 503, 504) or (error.status == 429 and following.has_begun):
            self._pause(str(error))
        else:
            raise Stop(FAILED, f"{self._server.url}: {error}") from error

    def _advice(self, reason: str) -> str:
        return (
            f"cannot reach {self._server.url}: {reason}. "
            "Start a server with `topics serve`, or say where it is with --url or TOPICS_URL"
        )

    # -- events --------------------------------------------------------------------------------------------

    def _take(self, event: Event) -> None:
        try:
            self._act(event)
        except msgspec.DecodeError as error:
            raise Stop(
                FAILED, f"{self._server.url} sent an event that means nothing here: {error}"
            ) from error

    def _act(self, event: Event) -> None:
        match event.name:
            case "record":
                self._show(msgspec.json.decode(event.data, type=_Records))
            case "tombstone":
                gap = msgspec.json.decode(event.data, type=_Gap)
                # Records of a topic that was made again come from its beginning, below the end of that gap.
                recreated = gap.reason == "recreated"
                self._following.moved(gap.topic, 0 if recreated else gap.gap_to)
                self._say(gap_text(gap))
            case "caught-up":
                mark = msgspec.json.decode(event.data, type=_CaughtUp)
                self._following.moved(mark.topic, mark.head_seq)
            case "topic-deleted":
                topic = msgspec.json.decode(event.data, type=_TopicDeleted).topic
                self._following.ended(topic)
                self._say(f"{topic} was deleted")
            case "error":
                self._fail(msgspec.json.decode(event.data, type=_Error))
            case _:  # of a later version
                pass

    def _show(self, page: _Records) -> None:
        records = page.records if self._left is None else page.records[: self._left]
        self._write(b"".join(self._form(page.topic, record) for record in records))
        self._following.moved(page.topic, page.to_seq)
        if self._left is not None:
            self._left -= len(records)
            if not self._left:
                raise Stop(OK)

    def _write(self, text: bytes) -> None:
        try:
            self._out.write(text)
            self._out.flush()
        except OSError as error:
            # Python would flush once more at its end, and complain.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._out.fileno())
            if isinstance(error, BrokenPipeError):
                raise Stop(OK) from error
            raise Stop(FAILED, f"cannot write: {error.strerror}") from error

    def _fail(self, error: _Error) -> None:
        if error.code == "taken_over":
            raise Stop(FAILED, error.message or "somebody else has taken over this stream")
        if error.code == 410:
            self._following.stream_path = None
        elif error.code == 429:  # advice: the stream goes on
            self._say(error.message)
        else:
            self._why = error.message or str(error.code)

    def _check_reader(self) -> None:
        """Whoever reads our lines may go while there are none: `topics tail … | head -n 1`."""
        if is_abandoned(self._out):
            raise Stop(OK)


def gap_text(gap: _Gap) -> str:
    if gap.reason == "recreated":
        return f"{gap.topic} ends before that seq, so it was deleted and made again; from its beginning"
    some = (
        f"record {gap.gap_from} is"
        if gap.gap_from == gap.gap_to
        else f"records {gap.gap_from} to {gap.gap_to} are"
    )
    return f"{gap.topic}: {some} gone ({gap.reason})"


def is_abandoned(out: BinaryIO) -> bool:
    with suppress(OSError, ValueError):
        poll = select.poll()
        poll.register(out.fileno(), 0)
        return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))
    return False


# -- the command -------------------------------------------------------------------------------------------


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="topics tail",
        description="Follow topics until Ctrl-C; by default only what comes from now on.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "topics",
        nargs="+",
        metavar="TOPIC",
        help="name of a topic that exists, or a pattern, for later ones too: 'orders.>'",
    )
    start = parser.add_mutually_exclusive_group()
    start.add_argument(
        "--from", dest="from_seq", type=_seq, metavar="SEQ", help="begin after this seq, in every topic"
    )
    start.add_argument(
        "--all", dest="from_seq", action="store_const", const=0, help="begin with the first record"
    )
    parser.add_argument("--count", type=_count, metavar="N", help="stop after N records")
    parser.add_argument(
        "--group",
        metavar="NAME",
        help="share with all who name this group: each record goes to one of them, at most once; where it begins, the first one says",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--json", action="store_true", help="one JSON object a line: the record, with its topic and tag"
    )
    form.add_argument("--raw", action="store_true", help="data only, as JSON; bytes as base64 text")
    url = environ.get("TOPICS_URL") or DEFAULT_URL
    parser.add_argument("--url", default=url, help=f"where the server is; TOPICS_URL, else {DEFAULT_URL}")
    key = environ.get("TOPICS_API_KEY", "")
    parser.add_argument(
        "--key", default=key, help="API key; better in TOPICS_API_KEY, where others do not see it"
    )
    return parser.parse_args(argv)


def _seq(text: str) -> int:
    return _number(text, 0)


def _count(text: str) -> int:
    return _number(text, 1)


def _number(text: str, least: int) -> int:
    if not (text.isascii() and text.isdigit() and least <= int(text) <= U64_MAX):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least {least}")
    return int(text)


def form_of(options: argparse.Namespace, out: BinaryIO, environ: Mapping[str, str]) -> lines.Format:
    if options.json:
        return lines.as_json
    if options.raw:
        return lines.data_only
    return lines.coloured if out.isatty() and not environ.get("NO_COLOR") else lines.human


def main(argv: Sequence[str]) -> int:
    options = parse(argv, os.environ)
    out = sys.stdout.buffer
    say = teller(sys.stderr)
    try:
        server = Server(options.url, options.key)
    except ValueError as error:
        say(str(error))
        return 2
    wanted = Wanted(
        tuple(options.topics),
        options.from_seq,
        options.group,
        # A page that is not shown to its end is lost for a group.
        min(options.count or 0, FRAME_RECORDS_MAX),
        include_tags=options.json,
    )
    tail = Tail(server, wanted, form_of(options, out, os.environ), out, say, options.count)
    try:
        tail.run()
    except Stop as stop:
        if str(stop):
            say(str(stop))
        return stop.code
    except KeyboardInterrupt:
        return INTERRUPTED


def teller(stream: TextIO) -> Callable[[str], None]:
    def say(text: str) -> None:
        print(f"topics tail: {text}", file=stream, flush=True)

    return say
