"""Exit codes of the server, and the errors that prevent a start."""

from __future__ import annotations

CLEAN = 0
UNEXPECTED = 1
BAD_CONFIGURATION = 2
LOCKED = 3
CANNOT_BIND = 4
FAILING = 5

MEANINGS = {
    CLEAN: "drained and stopped",
    UNEXPECTED: "an unexpected error, or a stop that had to be forced",
    BAD_CONFIGURATION: "the configuration or the data directory's layout was refused",
    LOCKED: "another server holds the data directory",
    CANNOT_BIND: "the address or port cannot be bound",
    FAILING: "stopped while a shard was down or a process kept failing; such a shard has no last snapshot",
}


class Refusal(Exception):
    """The server does not start; the text says why and what to do."""

    exit_code = UNEXPECTED


class BadConfiguration(Refusal):
    exit_code = BAD_CONFIGURATION


class DirectoryLocked(Refusal):
    exit_code = LOCKED


class CannotBind(Refusal):
    exit_code = CANNOT_BIND
