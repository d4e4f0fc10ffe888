"""Events: pushes of job streams as server-sent events, which a front only passes on; everything else as JSON."""

from __future__ import annotations

from topics.engine.commands import consumers as con
from topics.protocols.http import sse
from topics.protocols.json.consumer_replies import job_events
from topics.protocols.json.encoding import Json


class Events(Json):
    @staticmethod
    def job_events(result: con.Claimed, *, headers_only: bool = False) -> bytes:
        return sse.job_events(job_events(result, headers_only=headers_only))
