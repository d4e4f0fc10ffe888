"""Checks the frames that one watcher gets, over any number of streams, and follows its cursors."""

from __future__ import annotations

from collections import defaultdict

from tests.support.sse_client import Frame


class FrameChecker:
    """Cursors as a client knows them. With `skips`, positions may also move without a frame: filters, deletes,
    groups.
    """

    def __init__(
        self, cursors: dict[str, int] | None = None, *, skips: bool = False, keeps_data: bool = False
    ) -> None:
        self.cursors = dict(cursors or {})
        self.skips = skips
        self.keeps_data = keeps_data
        self.seqs: dict[str, list[int]] = defaultdict(list)
        self.data: dict[str, list[object]] = defaultdict(list)
        self.gaps: dict[str, list[tuple[str, int, int]]] = defaultdict(list)
        self.ended: set[str] = set()
        self.last_id: str | None = None

    @property
    def count(self) -> int:
        return sum(len(seqs) for seqs in self.seqs.values())

    def take_all(self, frames: list[Frame]) -> FrameChecker:
        for frame in frames:
            self.take(frame)
        return self

    def take(self, frame: Frame) -> None:
        if frame.event in ("retry", "hb", "error"):
            return
        topic = frame.data["topic"]
        assert topic not in self.ended, f"{topic} has ended: {frame}"
        match frame.event:
            case "record":
                self._records(topic, frame)
            case "tombstone":
                self._tombstone(topic, frame)
            case "caught-up":
                self._moved_to(topic, frame.data["head_seq"])
            case "topic-deleted":
                assert frame.data == {"topic": topic, "head_seq": 0, "reason": "deleted"}
                self.ended.add(topic)
        self.last_id = frame.id
        self._check_id(topic, frame)

    def _moved_to(self, topic: str, seq: int) -> None:
        """The position according to a frame: equal to the known one, unless seqs were skipped without a frame."""
        known = self.cursors.setdefault(topic, seq)
        assert seq >= known if self.skips else seq == known, f"{topic}: known to be at {known}, now at {seq}"
        self.cursors[topic] = seq

    def _records(self, topic: str, frame: Frame) -> None:
        data, seqs = frame.data, frame.seqs
        self._moved_to(topic, data["from_seq"])
        assert seqs, "a frame without records"
        assert seqs == sorted(set(seqs))
        assert data["from_seq"] < seqs[0] and seqs[-1] <= data["to_seq"] <= data["head_seq"], data
        self.seqs[topic] += seqs
        if self.keeps_data:
            self.data[topic] += [record["data"] for record in data["records"]]
        self.cursors[topic] = data["to_seq"]

    def _tombstone(self, topic: str, frame: Frame) -> None:
        data = frame.data
        first, last = data["gap_from"], data["gap_to"]
        self.gaps[topic].append((data["reason"], first, last))
        if data["reason"] == "recreated":
            # Reading starts again: what was known is of an earlier topic of this name.
            assert (first, last) == (1, data["head_seq"])
            self.cursors.pop(topic, None)
            self.seqs[topic].clear()
            return
        assert first <= last <= data["head_seq"]
        self._moved_to(topic, first - 1)
        assert data["earliest_seq"] == last + 1
        self.cursors[topic] = last

    def _check_id(self, topic: str, frame: Frame) -> None:
        """The id contains every topic of the stream, each with the cursor to which the earlier frames have led."""
        if len(self.cursors) > 64:
            return
        cursors = frame.cursors
        for name, known in self.cursors.items():
            if name in self.ended:
                continue
            may_skip = self.skips and name != topic
            assert cursors[name] == known or (may_skip and cursors[name] > known), (name, known, cursors)
