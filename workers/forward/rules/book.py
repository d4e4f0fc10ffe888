"""Index of the catalog's forwarding rules by name, source and dest, and detection of cycles.

It indexes the rules that the engine of shard 0 stores, and has no part in creating or deleting them. A rule that is being
created conflicts with others like an existing one; a rule that is being deleted does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from sortedcontainers import SortedDict

from topics.engine.commands.forwards import Forward, source_matches
from topics.engine.core.subject_trie import SubjectTrie


class RuleBook:
    def __init__(self) -> None:
        self._rules: dict[int, Forward] = {}
        self._names: SortedDict[str, int] = SortedDict()
        self._by_source: dict[str, dict[int, None]] = {}
        self._by_dest: dict[str, dict[int, None]] = {}
        self._patterns: SubjectTrie[int] = SubjectTrie()
        self.unsettled: dict[int, None] = {}  # uids of rules that are being created or deleted
        self.gone: dict[int, None] = {}  # uids of rules dropped with a topic: hidden, and to be deleted

    @property
    def count(self) -> int:
        return len(self._rules)

    def __iter__(self) -> Iterator[Forward]:
        return iter(list(self._rules.values()))

    def get(self, uid: int) -> Forward | None:
        return self._rules.get(uid)

    def find(self, name: str) -> Forward | None:
        uid = self._names.get(name)
        return self._rules[uid] if uid is not None else None

    def put(self, forward: Forward) -> None:
        uid = forward.uid
        if uid not in self._rules:
            self._names[forward.name] = uid
            self._by_source.setdefault(forward.source, {})[uid] = None
            self._by_dest.setdefault(forward.dest, {})[uid] = None
            if forward.is_pattern:
                self._patterns.insert(forward.source.encode(), uid)
        self._rules[uid] = forward
        if forward.state == "active":
            self.unsettled.pop(uid, None)
        else:
            self.unsettled[uid] = None

    def drop(self, uid: int) -> None:
        forward = self._rules.pop(uid, None)
        self.unsettled.pop(uid, None)
        self.gone.pop(uid, None)
        if forward is None:
            return
        if self._names.get(forward.name) == uid:
            del self._names[forward.name]
        for index, topic in ((self._by_source, forward.source), (self._by_dest, forward.dest)):
            del index[topic][uid]
            if not index[topic]:
                del index[topic]
        if forward.is_pattern:
            self._patterns.remove(forward.source.encode(), uid)

    # -- conflicts -----------------------------------------------------------------------------------------

    def has_other_source(self, forward: Forward) -> bool:
        """Whether another source is already copied to the dest, not counting the rule of this name."""
        others = [self._rules[uid] for uid in self._by_dest.get(forward.dest, ())]
        return any(
            rule.state != "ending" and rule.name != forward.name and rule.source != forward.source
            for rule in others
        )

    def find_cycle(self, source: str, dest: str) -> list[str] | None:
        """The shortest cycle that such a rule would close, as topic names; the first and last are the same."""
        came_from: dict[str, str | None] = {dest: None}
        line = [dest]
        for topic in line:
            if source_matches(source, topic):
                way = _way(came_from, topic)
                return [topic, *way]
            for following in self._dests_of(topic):
                if following not in came_from:
                    came_from[following] = topic
                    line.append(following)
        return None

    def _dests_of(self, topic: str) -> list[str]:
        uids = [*self._by_source.get(topic, ()), *self._patterns.match(topic.encode()).plain]
        return [self._rules[uid].dest for uid in uids if self._rules[uid].state != "ending"]

    # -- visibility ----------------------------------------------------------------------------------------

    def is_shown(self, rule: Forward) -> bool:
        return rule.state == "active" and rule.uid not in self.gone

    # -- lists ---------------------------------------------------------------------------------------------

    def page(
        self,
        wanted: Callable[[Forward], bool],
        *,
        prefix: str,
        after: str,
        source: str | None,
        dest: str | None,
        count: int,
    ) -> list[Forward]:
        """The first `count` rules by name, after the name `after`, that are visible and wanted."""
        rows: list[Forward] = []
        for name in self._candidates(max(prefix, after), source, dest):
            if not name.startswith(prefix):
                if name > prefix:
                    break
                continue
            rule = self._rules[self._names[name]]
            if name > after and self.is_shown(rule) and wanted(rule):
                rows.append(rule)
                if len(rows) == count:
                    break
        return rows

    def _candidates(self, first: str, source: str | None, dest: str | None) -> Iterator[str]:
        """Names in order, restricted by an index if possible."""
        if source is None and dest is None:
            yield from self._names.irange(first)
            return
        uids = self._by_dest.get(dest, {}) if dest is not None else self._by_source.get(source or "", {})
        found = [self._rules[uid] for uid in uids]
        yield from sorted(rule.name for rule in found if source is None or rule.source == source)


def _way(came_from: dict[str, str | None], topic: str) -> list[str]:
    way: list[str] = []
    at: str | None = topic
    while at is not None:
        way.append(at)
        at = came_from[at]
    return way[::-1]
