"""Answers whose data is not looked at: it stays the JSON text that the server sent, so no digit of it can change.

Bytes stay the base64 text that stands for them; `encoding` says so.
"""

from __future__ import annotations

from typing import Any

from msgspec import Raw, field

from topics.client import answers

NO_DATA = Raw(b"null")


class RawRecord(answers.Record, kw_only=True):
    data: Raw = NO_DATA


class RawJob(answers.Job, kw_only=True):
    data: Raw = NO_DATA


# Lists that are changed in place have one type only; here they are filled by the decoder and read.
class RawPage(answers.Page, kw_only=True):
    records: list[RawRecord]  # type: ignore[assignment]


class RawLastRecords(answers.LastRecords, kw_only=True):
    records: list[RawRecord]  # type: ignore[assignment]


class RawRecords(answers.Records, kw_only=True):
    records: list[RawRecord]  # type: ignore[assignment]


class RawClaimed(answers.Claimed, kw_only=True):
    jobs: list[RawJob] = field(name="claimed")  # type: ignore[assignment]


RAW: dict[Any, Any] = {
    answers.Job: RawJob,
    answers.Page: RawPage,
    answers.LastRecords: RawLastRecords,
    answers.Records: RawRecords,
    answers.Claimed: RawClaimed,
}
