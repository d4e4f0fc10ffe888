"""What workers say to each other about forwards, as bytes: the bodies of wire.COPIES … wire.FORWARD_TOTALS.

    op               from → to                 topic    body                          answer, with status 200
    FORWARD_STEP     catalog → source, dest    -        a step: an engine's command   what the engine says to it
    COPIES           source → dest             dest     `Copies`                      `CopiesTaken`
    CATCH_UP         dest → source             -        `CatchUp`                     `CaughtUp`
    FORWARDS_GONE    anyone → catalog          -        `ForwardsGone`                nothing
    FORWARDS_CHECK   catalog → everyone        -        `ForwardsCheck`               `ForwardsMissed`
    FORWARD_TOTALS   catalog → dest            dest     `WantTotals`                  `ForwardTotals`

A refusal has the status and the JSON body that a client would get. FORWARD_TOTALS that names a topic is a read of this
topic, and catches up first like any other; without a name it is answered with what is there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import msgspec

from topics.api.errors import InvalidRequest
from topics.engine.commands import forwards as fwd
from topics.link import wire

Step: TypeAlias = fwd.OpenInflow | fwd.CloseInflow | fwd.OpenOutflow | fwd.CloseOutflow
StepDone: TypeAlias = fwd.InflowOpened | fwd.InflowClosed | fwd.OutflowOpened | fwd.OutflowClosed


class CatchUp(msgspec.Struct, array_like=True):
    """Bring what these rules have published so far to their dests, and answer then."""

    uids: list[int]


class CaughtUp(msgspec.Struct, array_like=True):
    """`behind`: rules that could not get there, though their dest is not full: it could not be asked, or has refused."""

    behind: list[int] = []


class ForwardsGone(msgspec.Struct, array_like=True):
    """A topic was dropped, and these rules with it. The answer comes when the catalog has dropped them, too."""

    forwards: list[tuple[int, str]]  # uid, name


class ForwardsCheck(msgspec.Struct, array_like=True):
    """What a shard should have. All of it: whatever else it has belongs to no rule."""

    inflows: list[tuple[str, int]]  # dest, uid
    outflows: list[tuple[int, int]]  # uid, digest of the rule


class ForwardsMissed(msgspec.Struct, array_like=True):
    """How a shard differs from that."""

    inflows: list[int] = []  # it should have them, and does not
    outflows: list[int] = []
    stale_outflows: list[int] = []  # it has another version of the rule
    stray_inflows: list[tuple[str, int]] = []  # it has them, and should not
    stray_outflows: list[int] = []


class WantTotals(msgspec.Struct, array_like=True):
    inflows: list[tuple[str, int]]  # dest, uid


class ForwardTotals(msgspec.Struct, array_like=True):
    """How many copies each rule has made. A rule that is not there has no entry."""

    totals: dict[int, int]
    catch_up_timed_out: bool = False


_STEPS: tuple[type[Step], ...] = (fwd.OpenInflow, fwd.CloseInflow, fwd.OpenOutflow, fwd.CloseOutflow)
_DONE: tuple[type[StepDone], ...] = (
    fwd.InflowOpened,
    fwd.InflowClosed,
    fwd.OutflowOpened,
    fwd.OutflowClosed,
)

encode = msgspec.msgpack.Encoder().encode
_tagged = msgspec.msgpack.Decoder(tuple[int, msgspec.Raw]).decode
_steps = [msgspec.msgpack.Decoder(kind).decode for kind in _STEPS]
_done = [msgspec.msgpack.Decoder(kind).decode for kind in _DONE]

T = TypeVar("T")


def _reader(kind: type[T], name: str) -> Callable[[wire.Buffer], T]:
    decode = msgspec.msgpack.Decoder(kind).decode

    def read(body: wire.Buffer) -> T:
        try:
            return decode(body)
        except msgspec.MsgspecError as error:
            raise InvalidRequest(f"{name} cannot be read: {error}") from None

    return read


read_copies = _reader(fwd.Copies, "copies")
read_taken = _reader(fwd.CopiesTaken, "an answer to copies")
read_catch_up = _reader(CatchUp, "a wish to catch up")
read_caught_up = _reader(CaughtUp, "an answer to a wish to catch up")
read_gone = _reader(ForwardsGone, "forwards that are gone")
read_check = _reader(ForwardsCheck, "a check of forwards")
read_missed = _reader(ForwardsMissed, "an answer to a check of forwards")
read_want_totals = _reader(WantTotals, "a wish for totals")
read_totals = _reader(ForwardTotals, "totals")


def encode_step(step: Step) -> bytes:
    return encode((_STEPS.index(type(step)), step))


def encode_step_done(done: StepDone) -> bytes:
    return encode((_DONE.index(type(done)), done))


def read_step(body: wire.Buffer) -> Step:
    step: Step = _read_tagged(_steps, body, "a step of a forward")
    return step


def read_step_done(body: wire.Buffer) -> StepDone:
    done: StepDone = _read_tagged(_done, body, "an answer to a step of a forward")
    return done


def _read_tagged(readers: list[Callable[..., Any]], body: wire.Buffer, name: str) -> Any:
    try:
        kind, content = _tagged(body)
        if not 0 <= kind < len(readers):
            raise InvalidRequest(f"{name} of the unknown kind {kind}")
        return readers[kind](content)
    except msgspec.MsgspecError as error:
        raise InvalidRequest(f"{name} cannot be read: {error}") from None
