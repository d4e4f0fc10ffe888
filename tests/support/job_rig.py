"""Job streams of one shard; the test sends the messages that fronts would send."""

from __future__ import annotations

import json
from typing import Any

from tests.support.shard_answers import ShardAnswer
from tests.support.shard_rig import FRONT
from tests.support.sse_client import Frame, parse_frame
from tests.support.watch_rig import FeedRig
from topics.link import wire
from topics.link.job_streams import JobStreamOptions, encode

Key = tuple[bytes, int]
CALLER = b"another front"  # the peer for calls that do not belong to a stream


class JobRig(FeedRig):
    """One shard with a queue `q`, and everything it sends to its streams."""

    def __init__(self, **config: Any) -> None:
        super().__init__()
        self.put("q", type="queue", **config)

    # -- messages of fronts --------------------------------------------------------------------------------

    def work(
        self,
        topic: str = "q",
        consumer: str = "",
        *,
        node: str = "n",
        max: int = 1,
        lease_ms: int = 0,
        check_only: bool = False,
        peer: bytes = FRONT,
    ) -> Key:
        """Open a stream; the first reply with its key is the answer."""
        key = self.receive(
            wire.OPEN_JOBS,
            topic,
            encode(JobStreamOptions(consumer, node, max, lease_ms, check_only)),
            peer=peer,
            encoding=wire.EVENTS,
        )
        self.rest()
        return key

    def worked(self, *keys: Key) -> None:
        for key in keys:
            self.tell(wire.JOBS_ACK, key)
        self.rest()

    def unwork(self, *keys: Key) -> None:
        for key in keys:
            self.tell(wire.CLOSE_JOBS, key)
        self.rest()

    # -- messages to streams -------------------------------------------------------------------------------

    def answer(self, key: Key) -> ShardAnswer:
        return self.heard[key][0]

    def pushed(self, key: Key) -> list[list[Frame]]:
        """The events of each push, without the end."""
        assert self.answer(key).status == 200, bytes(self.answer(key).body)
        found = []
        for reply in self.heard[key][1:]:
            assert reply.kind == wire.JOBS
            if reply.status == 200:
                texts = bytes(reply.body).split(b"\n\n")
                assert texts.pop() == b""
                found.append([parse_frame(text + b"\n\n") for text in texts])
        return found

    def events(self, key: Key) -> list[Frame]:
        return [event for push in self.pushed(key) for event in push]

    def seqs(self, key: Key) -> list[int]:
        return [event.data["$seq"] for event in self.events(key) if event.event != "tombstone"]

    def end(self, key: Key) -> tuple[int, str] | None:
        """Status and code with which the stream was ended, if it was."""
        last = self.heard[key][-1]
        return None if last.status == 200 else (last.status, json.loads(bytes(last.body))["error"]["code"])

    # -- other calls ---------------------------------------------------------------------------------------

    def call(self, op: int, topic: str = "q", consumer: str = "", **body: Any) -> dict[str, Any]:
        args = wire.encode_args(wire.Args(consumer=consumer)) if consumer else b""
        reply = self.ask(op, topic, body, args=args, peer=CALLER)
        assert reply is not None and reply.status in (200, 201), reply
        answer: dict[str, Any] = json.loads(bytes(reply.body))
        return answer

    def claim(
        self, topic: str = "q", consumer: str = "", *, node: str = "other", max: int = 1
    ) -> dict[int, int]:
        """The delivery count of each claimed job, by seq."""
        claimed = self.call(wire.CLAIM, topic, consumer, node=node, max=max)["claimed"]
        return {job["$seq"]: job["deliveries"] for job in claimed}

    def ack(self, *seqs: int, topic: str = "q", consumer: str = "", node: str = "n") -> None:
        answer = self.call(wire.ACK, topic, consumer, node=node, seqs=list(seqs))
        assert answer["skipped"] == [], answer

    def put_consumer(self, topic: str = "t", name: str = "c", **config: Any) -> None:
        self.call(wire.PUT_CONSUMER, topic, name, **config)
