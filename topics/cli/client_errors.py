"""Messages and exit codes for errors of the client library."""

from __future__ import annotations

from topics.cli.errors import FAILED, UNKNOWN, UNREACHABLE, CommandError
from topics.client import errors

# The client's own messages advise Python programmers; these advise users of the command.
_ADVICE: dict[type[errors.ClientError], str] = {
    errors.Disconnected: "Start a server with `topics serve`, or give its address with --url or TOPICS_URL",
    errors.Unauthorized: "Set TOPICS_TOKEN, or save a key with `topics context add`",
    errors.TopicNotFound: "`topics topic ls` lists topics; `topics topic create` creates one",
    errors.ConsumerNotFound: "`topics consumer ls` lists consumers; `topics consumer create` creates one",
    errors.RouterNotFound: "`topics router ls` lists routers",
    errors.NotAQueue: "Create queues with `topics topic create NAME --type queue`, or use --consumer",
    errors.TopicNotEmpty: "`topics topic purge` empties it",
    errors.TopicFull: "Delete records with `topics topic purge`, or raise its caps with `topics topic set`",
    errors.Throttled: "Wait, or send less at once",
    errors.NotReady: "A shard is not available: `topics health` shows why; `topics health --wait 60` waits for it",
    errors.ServerFault: "See the server's log",
    errors.WrongLastSeq: "Another client has written since: read the new records, then decide again",
    errors.BadAnswer: "Check the address, and any proxy in between",
}
_UNKNOWN_OUTCOME = "The request may have been carried out: check before repeating it"


def command_error(error: errors.ClientError, context: str = "") -> CommandError:
    """`context`: the saved context that the server's address comes from."""
    code = FAILED
    is_disconnected = isinstance(error, errors.Disconnected)
    if error.outcome == "unknown" and not isinstance(error, errors.BadAnswer):
        code = UNKNOWN
    elif is_disconnected:
        code = UNREACHABLE
    advice = _UNKNOWN_OUTCOME if code == UNKNOWN else advice_for(error)
    if code == UNREACHABLE and context:
        advice = (
            f"The address is from the context {context!r}: switch with `topics context use`, or give --url"
        )
    text = str(error)
    if is_disconnected:
        text = text.replace("Connection refused", "connection refused")
    return CommandError(f"{text}. {advice}" if advice else text, code)


def advice_for(error: errors.ClientError) -> str:
    if isinstance(error, errors.Throttled) and error.detail.get("limit") == "disk_full":
        return ""  # the message already says what to do
    for kind in type(error).__mro__:
        if kind in _ADVICE:
            return _ADVICE[kind]
    return ""
