"""Checks what an engine shows after a restart, a crash or a power cut.

The log has the writes since the last restart in order, acked or not. After a crash each topic must show the state
after some prefix of its writes (the log is cut at one position). How short the prefix may be depends on the
durability class:

- clean stop: all writes; process crash: exactly all acked ones, and perhaps more;
- power cut: at least those acked after a sync, and everything before them in the log. A topic that was `disk` may
  lose more, but then its head is at or above the acked head, and the seqs in between are one loss range;
- `memory` may come back with any prefix or empty, `ephemeral` without records; neither may show anything unknown;
- a key is remembered if its records are there, and forgotten if the restart lost them.

A refused write is not in that log: it must never be seen. One of unknown outcome stays, unacked. The prefix that
matches becomes the new model.
"""

from __future__ import annotations

from collections import Counter

from tests.support.model import Loss, Model, Topic
from tests.support.model_commands import Divergence, Seen, Sent, seen_of


def _twin(topic: Topic | None) -> Topic | None:
    return topic.copy() if topic is not None else None


class RestartCheck:
    """The topics of an engine after one restart, compared with what its promises allow."""

    def __init__(self, how: str, *, unsure: bool, sync_floor: int, now: int, events: Counter[str]) -> None:
        self.how = how
        self.unsure = unsure  # unsynced data may be lost
        self.sync_floor = sync_floor  # everything submitted up to here was synced
        self.now = now
        self.events = events
        self.forgotten: list[tuple[str, bytes]] = []  # keys whose records the restart lost
        self._acked_heads: dict[int, int] = {}

    def _history(self, name: str, old: Model, log: list[Sent]) -> tuple[list[Topic | None], int]:
        """The states of one topic after each of its writes, and the index of the first that is allowed."""
        model = Model()
        if name in old.topics:
            model.topics[name] = old.topics[name].copy()
            model.instances = model.topics[name].instance  # so that a later instance has another number
        states: list[Topic | None] = [_twin(model.topics.get(name))]
        least = 0
        self._acked_heads = {topic.instance: topic.head for topic in states if topic is not None}
        for sent in log:
            if sent.topic != name:
                continue
            sent.apply(model, sent.now)
            topic = _twin(model.topics.get(name))
            states.append(topic)
            if topic is not None and sent.acked:
                self._acked_heads[topic.instance] = topic.head
            lasts = sent.acked and (not self.unsure or sent.synced)
            if self.how == "clean" or lasts or sent.index <= self.sync_floor:
                least = len(states) - 1
        return states, least

    def verdict(self, name: str, old: Model, log: list[Sent], seen: Seen | None) -> tuple[Topic | None, bool]:
        """The state that the engine shows, and whether all of it is known. Raises Divergence when none is allowed."""
        how, unsure, now = self.how, self.unsure, self.now
        states, least = self._history(name, old, log)
        soft = {"ephemeral"} if not unsure else {"ephemeral", "memory"}
        is_soft = any(topic is not None and topic.classes & soft for topic in states)
        tried = []
        for j in range(len(states) - 1, (-1 if is_soft else least - 1), -1):
            topic = states[j]
            if topic is None or seen is None:
                if topic is None and seen is None and j >= least:
                    return None, True
                continue
            wanted = seen_of(topic, now)
            high_enough = is_soft or seen.head >= self._acked_heads.get(topic.instance, 0)
            if wanted == seen and high_enough:
                self._keep_keys(name, topic, topic, seen, whole=True)
                return topic, "ephemeral" not in topic.classes
            tried.append(wanted)
            # Only classes that ack before the sync ever skip seqs.
            if unsure and seen.head > topic.head and topic.classes - {"fsync"}:
                topic.lose(topic.head + 1, seen.head, "crash")
                topic.head = seen.head
                wanted = seen_of(topic, now)
                if wanted == seen and high_enough:
                    self.events["tail lost"] += 1
                    self._keep_keys(name, topic, topic, seen, whole=True)
                    return topic, "ephemeral" not in topic.classes
                tried.append(wanted)
        if is_soft and seen is not None:
            return self._adopt(name, states, least, seen), False
        raise Divergence(
            f"{name!r} after {how}: allowed are the last {len(states) - least} of {len(states)} states "
            f"(acked heads {self._acked_heads})\n  engine {seen}\n"
            + "\n".join(f"  model  {wanted}" for wanted in tried[:6])
            + ("\n  model  absent" if any(topic is None for topic in states[least:]) else "")
        )

    def _adopt(self, name: str, states: list[Topic | None], least: int, seen: Seen) -> Topic:
        """A topic without promises may have lost anything, but must not show anything unknown."""
        how = self.how
        known = [topic for topic in states if topic is not None]
        records = {rec.row(): rec for topic in known for rec in topic.live.values()}
        if not set(seen.rows) <= records.keys():
            raise Divergence(f"{name!r} after {how}: unknown records: {set(seen.rows) - records.keys()}")
        if seen.head > max(topic.head for topic in known) and "disk" not in known[-1].classes:
            raise Divergence(f"{name!r} after {how}: head {seen.head} is above all seqs ever requested")
        if seen.conf not in [topic.conf for topic in states[least:] if topic is not None]:
            raise Divergence(f"{name!r} after {how}: config {seen.conf} is not the last one")
        if seen.conf.durability == "ephemeral" and all(topic.classes == {"ephemeral"} for topic in known):
            if seen.rows:
                raise Divergence(f"{name!r} is ephemeral and kept records over {how}: {seen}")
            if how == "clean" and seen.head != known[-1].head:
                raise Divergence(f"{name!r}: a clean stop lost the head {known[-1].head}: {seen}")
            lost = [
                [
                    seq
                    for seq in topic.live
                    if seq <= seen.head and not any(g.gap_from <= seq <= g.gap_to for g in seen.gaps)
                ]
                for topic in states[least:]
                if topic is not None
            ]
            if all(lost):
                raise Divergence(f"{name!r} after {how}: the loss of {lost[-1]} is not announced: {seen}")
        adopted = Topic(
            seen.conf, 0, head=seen.head, classes=set().union(*(topic.classes for topic in known))
        )
        adopted.live = {row[0]: records[row] for row in seen.rows}
        if len({topic.instance for topic in known}) == 1:
            known[-1].expire(self.now)
            self._keep_keys(name, adopted, known[-1], seen, whole=False)
        for gap in seen.gaps:
            if gap.reason in ("crash", "corrupt", "source_trim"):
                adopted.losses.append(Loss(*gap))
            else:
                adopted.cap_high = gap.gap_to
        return adopted

    def _keep_keys(self, name: str, topic: Topic, before: Topic, seen: Seen, *, whole: bool) -> None:
        """`topic` is the state after a restart, `before` the one before it. Keep the keys that certainly survived.
        `whole`: every logged write of `before` survived, so its key did too, even where its records were dead.
        """
        seqs = {row[0] for row in seen.rows}
        fates = {key: before.outlasts(key, seqs) for key in before.keys}
        self.forgotten += [(name, key) for key, lasts in fates.items() if lasts is False]
        kept = {
            key: known
            for key, known in before.keys.items()
            if fates[key] or (fates[key] is None and whole and key not in before.moved_keys)
        }
        topic.keys, topic.ram_keys, topic.moved_keys = kept, set(), set()
