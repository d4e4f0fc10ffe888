"""Goal: both formats have the same information on one line, and no secret is logged.

Method: records of a private logger through each formatter, and `configure` in a real process.
"""

from __future__ import annotations

import json
import logging
import os
from contextlib import suppress

import pytest

from topics.system.logs import REDACTED, HumanFormatter, JsonFormatter, _Handler, configure, log


class Lines(logging.Handler):
    def __init__(self, formatter: logging.Formatter) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


def logger_to(formatter: logging.Formatter) -> tuple[logging.Logger, list[str]]:
    handler = Lines(formatter)
    logger = logging.Logger("test")
    logger.addHandler(handler)
    return logger, handler.lines


def fail() -> None:
    raise ValueError("swordfish")


def test_json_lines() -> None:
    logger, lines = logger_to(JsonFormatter("shard 0"))
    log(logger, logging.INFO, "recovered", topics=12, path="a b", parts=[1, None])
    logger.warning("plain %d", 7)
    first, second = (json.loads(line) for line in lines)
    assert (first["level"], first["process"]) == ("info", "shard 0")
    assert first["message"] == "recovered"
    assert first["fields"] == {"topics": 12, "path": "a b", "parts": [1, None]}
    assert isinstance(first["pid"], int)
    assert first["ts"].endswith("Z")
    assert second["message"] == "plain 7"
    assert "fields" not in second


def test_human_lines() -> None:
    logger, lines = logger_to(HumanFormatter("front 1"))
    log(logger, logging.ERROR, "it broke", path="/x", text='a "b" c', count=3, none=None, empty="")
    assert (
        lines[0].split(" ", 1)[1]
        == r'error   front 1: it broke path=/x text="a \"b\" c" count=3 none=null empty=""'
    )


@pytest.mark.parametrize("kind", [HumanFormatter, JsonFormatter])
def test_text_from_outside_cannot_fake_a_line_or_steer_a_terminal(
    kind: type[HumanFormatter | JsonFormatter],
) -> None:
    logger, lines = logger_to(kind("p"))
    log(logger, logging.INFO, "a\nb\x1b[2J", field="c\nd\x1b[2J")
    assert "\n" not in lines[0]
    assert "\x1b" not in lines[0]


@pytest.mark.parametrize("kind", [HumanFormatter, JsonFormatter])
@pytest.mark.parametrize("secret", ["swordfish", 'quo"te', "größe", "new\nline"])
def test_secrets_are_blotted_out_everywhere(kind: type[HumanFormatter | JsonFormatter], secret: str) -> None:
    logger, lines = logger_to(kind("p", ["sword", secret, ""]))
    log(
        logger,
        logging.INFO,
        f"key {secret}",
        text=secret,
        nested={"deep": [secret]},
        thing=ValueError(secret),
    )
    logger.info("argument %s", secret)
    try:
        raise ValueError(secret)
    except ValueError:
        logger.exception("failed")
    for line in lines:
        assert REDACTED in line
        for form in (secret, json.dumps(secret)[1:-1], "fish"):
            assert form not in line


def test_tracebacks_come_along() -> None:
    for kind in (HumanFormatter, JsonFormatter):
        logger, lines = logger_to(kind("p"))
        try:
            fail()
        except ValueError:
            logger.exception("failed")
        assert "test_logs.py" in lines[0]


def test_a_full_pipe_holds_nobody_up() -> None:
    """Meanwhile lines are dropped, and counted for the next reader."""
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    with suppress(BlockingIOError):
        while True:
            os.write(write_end, b"x" * 4096)
    os.set_blocking(write_end, True)
    with os.fdopen(write_end, "w", buffering=1) as stream:
        handler = _Handler(stream)
        handler.setFormatter(JsonFormatter("test"))
        for number in range(3):
            handler.emit(logging.LogRecord("x", logging.INFO, "", 0, f"line {number}", None, None))
        os.read(read_end, 1 << 20)
        handler.emit(logging.LogRecord("x", logging.INFO, "", 0, "line 3", None, None))
    told, line = map(json.loads, os.read(read_end, 1 << 20).splitlines())
    os.close(read_end)
    assert (told["level"], told["fields"], line["message"]) == ("warning", {"lines": 3}, "line 3")


def test_configuring_twice_does_not_log_twice() -> None:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    try:
        configure("a", "json")
        configure("b", "json")
        assert len(root.handlers) == 1
    finally:
        root.handlers[:], level = before
        root.setLevel(level)
