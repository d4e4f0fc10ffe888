"""Messages between workers about forwards: the bodies of wire.COPIES … wire.FORWARD_TOTALS.

    op               from → to                 topic    body                          reply, with the code OK
    FORWARD_STEP     catalog → source, dest    -        an engine command             its result
    COPIES           source → dest             dest     `Copies`                      `CopiesTaken`
    CATCH_UP         dest → source             -        `CatchUp`                     `CaughtUp`
    FORWARDS_GONE    any shard → catalog       -        `ForwardsGone`                nothing
    FORWARDS_CHECK   catalog → any shard       -        `ForwardsCheck`               `ForwardsMissed`
    FORWARD_TOTALS   catalog → dest            dest     `WantTotals`                  `ForwardTotals`

A refusal is the error that a client would get. FORWARD_TOTALS with a topic is a read of that topic, and
catches up first like any other; without one it returns the current totals.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import msgspec
import xxhash

from topics.api.errors import InvalidRequest
from topics.engine.commands import forwards as fwd
from topics.link import wire

Step: TypeAlias = fwd.OpenInflow | fwd.CloseInflow | fwd.OpenOutflow | fwd.CloseOutflow
StepDone: TypeAlias = fwd.InflowOpened | fwd.InflowClosed | fwd.OutflowOpened | fwd.OutflowClosed


class CatchUp(msgspec.Struct, array_like=True):
    """Copy everything that these rules have published so far to their dests, then reply."""

    uids: list[int]


class CaughtUp(msgspec.Struct, array_like=True):
    """`behind`: rules that have not caught up, because their dest is unreachable or refuses copies. Not because it is full."""

    behind: list[int] = []


class ForwardsGone(msgspec.Struct, array_like=True):
    """A topic was dropped, and these rules with it. The reply comes when the catalog has dropped them, too."""

    forwards: list[tuple[int, str]]  # uid, name


class ForwardsCheck(msgspec.Struct, array_like=True):
    """All flows that a shard should have; any others do not belong to a rule."""

    inflows: list[tuple[str, int]]  # dest, uid
    outflows: list[tuple[int, int]]  # uid, digest of the rule


class ForwardsMissed(msgspec.Struct, array_like=True):
    """How a shard differs from a ForwardsCheck."""

    inflows: list[int] = []  # missing
    outflows: list[int] = []  # missing
    stale_outflows: list[int] = []  # of another version of the rule
    stray_inflows: list[tuple[str, int]] = []  # without a rule
    stray_outflows: list[int] = []  # without a rule


class WantTotals(msgspec.Struct, array_like=True):
    inflows: list[tuple[str, int]]  # dest, uid


class ForwardTotals(msgspec.Struct, array_like=True):
    """Number of copies made by each rule; unknown rules are absent."""

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
            raise InvalidRequest(f"{name} cannot be decoded: {error}") from None

    return read


read_copies = _reader(fwd.Copies, "copies")
read_taken = _reader(fwd.CopiesTaken, "a reply to copies")
read_catch_up = _reader(CatchUp, "a catch-up request")
read_caught_up = _reader(CaughtUp, "a reply to a catch-up request")
read_gone = _reader(ForwardsGone, "a list of dropped forwards")
read_check = _reader(ForwardsCheck, "a check of forwards")
read_missed = _reader(ForwardsMissed, "a reply to a check of forwards")
read_want_totals = _reader(WantTotals, "a request for totals")
read_totals = _reader(ForwardTotals, "totals")


def digest_of(forward: fwd.Forward) -> int:
    """Digest of a rule, without its state."""
    rule = msgspec.structs.replace(forward, state="active", made_source=False, made_dest=False)
    return xxhash.xxh3_64_intdigest(encode(rule))


def encode_step(step: Step) -> bytes:
    return encode((_STEPS.index(type(step)), step))


def encode_step_done(done: StepDone) -> bytes:
    return encode((_DONE.index(type(done)), done))


def read_step(body: wire.Buffer) -> Step:
    step: Step = _read_tagged(_steps, body, "a step of a forward")
    return step


def read_step_done(body: wire.Buffer) -> StepDone:
    done: StepDone = _read_tagged(_done, body, "a reply to a step of a forward")
    return done


def _read_tagged(readers: list[Callable[..., Any]], body: wire.Buffer, name: str) -> Any:
    try:
        kind, content = _tagged(body)
        if not 0 <= kind < len(readers):
            raise InvalidRequest(f"{name} has the unknown kind {kind}")
        return readers[kind](content)
    except msgspec.MsgspecError as error:
        raise InvalidRequest(f"{name} cannot be decoded: {error}") from None
