"""Text and exit code of an error of the client, for a terminal."""

from __future__ import annotations

from topics.cli.failures import FAILED, UNKNOWN, UNREACHABLE, Failed
from topics.client import errors

# The client's own advice speaks of Python.
_ADVICE: dict[type[errors.ClientError], str] = {
    errors.Disconnected: "Start a server with `topics serve`, or say where it is with --url or TOPICS_URL",
    errors.Unauthorized: "Give a key with TOPICS_TOKEN, or save one with `topics context add`",
    errors.TopicNotFound: "`topics topic ls` shows which there are; `topics topic create` makes one",
    errors.ConsumerNotFound: "`topics consumer ls` shows which there are; `topics consumer create` makes one",
    errors.RouterNotFound: "`topics router ls` shows which there are",
    errors.NotAQueue: "Make queues with `topics topic create NAME --type queue`, or name a --consumer",
    errors.TopicNotEmpty: "`topics topic purge` empties it",
    errors.TopicFull: "Delete records with `topics topic purge`, or raise its caps with `topics topic set`",
    errors.Throttled: "Wait, or send less at once",
    errors.NotReady: "Its worker does not serve: `topics health` says why, and with `--wait 60` waits for it",
    errors.ServerFault: "See the log of the server",
    errors.WrongLastSeq: "Another client wrote in between: read what, and decide again",
    errors.BadAnswer: "Check the address, and what stands between: a proxy has pages of its own",
}
_MAYBE = "It may have been carried out all the same: look before you repeat it"


def failed(error: errors.ClientError, saved_as: str = "") -> Failed:
    """`saved_as`: the context that the server's address comes from."""
    code = FAILED
    is_silence = isinstance(error, errors.Disconnected)
    if error.outcome == "unknown" and not isinstance(error, errors.BadAnswer):
        code = UNKNOWN
    elif is_silence:
        code = UNREACHABLE
    advice = _MAYBE if code == UNKNOWN else advice_of(error)
    if code == UNREACHABLE and saved_as:
        advice = (
            f"That is the saved server {saved_as!r}: choose another with `topics context use`, or with --url"
        )
    text = str(error)
    if is_silence:
        text = text.replace("Connection refused", "connection refused")
    return Failed(f"{text}. {advice}" if advice else text, code)


def advice_of(error: errors.ClientError) -> str:
    if isinstance(error, errors.Throttled) and error.detail.get("limit") == "disk_full":
        return ""  # it says itself what to do
    for kind in type(error).__mro__:
        if kind in _ADVICE:
            return _ADVICE[kind]
    return ""
