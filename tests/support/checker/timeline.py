"""A topic's life in segments: where its seqs start again, and where a crash may have lost or undone something.

| cut | when | effect |
|---|---|---|
| drop | a topic was, or may have been, deleted | a new instance: nothing of the old one may be seen |
| wipe | any restart of an `ephemeral` topic | a new era: seqs may be used again, records are gone |
| fallback | a crash of a `memory` topic; corruption that made the server read-only | a new era: any record may be gone |
| tail | a power cut of a `disk` topic | the same era: seqs stay, the newest records may be gone (announced), deletes undone |

`fsync` topics are affected by drops only. After a failed disk call the next restart is as bad as a power cut.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Any

from tests.support.history import Event, History, Op

FOREVER = 1 << 62
RESTARTS = ("kill", "power", "stop")
ROUTER_CHANGES = ("put_router", "drop_router")
CLASSES = ("ephemeral", "memory", "disk", "fsync")  # weakest first

CONFIG_DEFAULTS: dict[str, Any] = {
    "type": "log",
    "ttl_ms": 0,
    "cap_records": 0,
    "cap_bytes": 0,
    "discard": "old",
    "idempotency_window_ms": 120_000,
    "dedupe_node": True,
    "cap_per_tag": 0,
    "max_record_bytes": 0,
    "lease_ms": 30_000,
    "leases_durable": False,
    "max_deliveries": 0,
    "dead_letter": None,
}


def full_config(given: dict[str, Any] | None) -> dict[str, Any]:
    """The fields that matter here, with their defaults."""
    given = given or {}
    config = {name: given.get(name, default) for name, default in CONFIG_DEFAULTS.items()}
    config["durability"] = given.get("durability") or ("fsync" if given.get("durable") else "disk")
    return config


def weakest(classes: set[str]) -> str:
    return next(name for name in CLASSES if name in classes)


def touches(event: Event, topic: str) -> bool:
    return event.topics is None or topic in event.topics


@dataclass(slots=True)
class Setting:
    """A config that was, or may have been, put in force between two moments."""

    sent: int
    settled: int
    certain: bool
    config: dict[str, Any]
    first: int = 0  # instances that it may belong to
    last: int = 0


@dataclass(slots=True)
class Cut:
    """A cut; everything that was in flight between `start` and `end` may belong to either side."""

    start: int
    end: int
    kind: str
    certain: bool = True  # that it happened to this topic


@dataclass(slots=True)
class Timeline:
    """Segments are numbered from 0. `era` and `instance` have one entry for each."""

    topic: str
    cuts: list[Cut] = field(default_factory=list)
    era: list[int] = field(default_factory=lambda: [0])
    instance: list[int] = field(default_factory=lambda: [0])
    back: list[int] = field(default_factory=lambda: [0])  # by instance: the oldest that it may really be
    settings: list[Setting] = field(default_factory=list)
    latches: list[tuple[int, int]] = field(default_factory=list)  # from a failed disk call to the restart
    restarts: list[Event] = field(default_factory=list)  # of its shard's worker
    overs: list[Event] = field(default_factory=list)  # no lease survived these
    calms: list[int] = field(default_factory=list)
    corrupted_at: int = FOREVER  # the first corruption that can affect the topic
    skipped: int = FOREVER  # the first crash after which seqs of a `disk` topic may be skipped
    may_lose: bool = False  # a crash can have lost records, perhaps while it was being dropped
    _all_configs: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    _starts: list[int] = field(default_factory=list)
    _ends: list[int] = field(default_factory=list)

    # -- the segments of a request -------------------------------------------------------------------------

    def settled(self, op: Op) -> int:
        """From here on it is decided, visibly, whether it was executed.

        What was in flight when a disk call failed may be in the log without being visible: a restart shows it.
        """
        end = FOREVER if op.settled_at is None else op.settled_at
        if not op.ok:
            for start, stop in self.latches:
                if op.sent_at < stop and end > start:
                    end = max(end, stop)
            if op.kind in ROUTER_CHANGES and not op.refused:
                # Once started it continues, however long that takes, and whatever dies.
                end = min((calm for calm in self.calms if calm > end), default=FOREVER)
        return end

    def span(self, sent: int, end: int) -> tuple[int, int]:
        """The segments in which something between these moments can have been executed."""
        return bisect_left(self._ends, sent), bisect_left(self._starts, end)

    def cut(self, cuts: list[Cut]) -> None:
        self.cuts = cuts
        self._starts = [cut.start for cut in cuts]
        self._ends = [cut.end for cut in cuts]
        era = instance = 0
        self.era, self.instance, self.back = [0], [0], [0]
        for cut in cuts:
            if cut.kind == "drop":
                instance += 1
                self.back.append(instance if cut.certain else self.back[-1])
            if cut.kind != "tail":
                era += 1
            self.era.append(era)
            self.instance.append(instance)

    # -- configs -------------------------------------------------------------------------------------------

    def configs(self, start: int, end: int, first: int, last: int) -> list[dict[str, Any]]:
        """All configs that can have been in force between the two moments, in these instances."""
        mine = [s for s in self.settings if s.sent < end and s.first <= last and s.last >= first]
        certain = [s for s in mine if s.certain and s.settled < start]
        newest = max((s.sent for s in certain), default=-1)
        found = [s.config for s in mine if s.settled > newest]
        return found or [full_config(None)]

    def ever(self, end: int, instance: int) -> list[dict[str, Any]]:
        """All configs that this instance can have had until then."""
        first = self.back[instance]
        if self.settings and end > self.settings[-1].sent and instance in self._all_configs:
            return self._all_configs[instance]
        found = [s.config for s in self.settings if s.sent < end and s.first <= instance and s.last >= first]
        found = found or [full_config(None)]
        if self.settings and end > self.settings[-1].sent:
            self._all_configs[instance] = found
        return found

    def class_of(self, start: int, end: int, first: int, last: int) -> str:
        return weakest({config["durability"] for config in self.configs(start, end, first, last)})


def make_timeline(history: History, topic: str, ops: list[Op]) -> Timeline:
    line = Timeline(topic)
    events = [event for event in history.events if touches(event, topic)]
    line.latches = _latches(events)
    line.restarts = [event for event in events if event.kind in RESTARTS]
    line.calms = [event.at for event in events if event.kind == "calm"]
    line.overs = [event for event in events if event.kind == "over"]
    line.corrupted_at = min((event.at for event in events if event.kind == "rot"), default=FOREVER)
    drops = _drop_cuts(line, ops)
    line.cut(drops)
    line.settings = _settings(line, ops)
    cuts = list(drops)
    for event in events:
        kind = _cut_kind(line, event, history) if event.kind in RESTARTS else None
        if kind:
            cuts.append(
                Cut(event.at, event.until or event.at, kind, event.kind != "kill" or event.topics is not None)
            )
    line.may_lose = len(cuts) > len(drops)
    line.cut(_merged(cuts))
    _place_settings(line)
    return line


def _latches(events: list[Event]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for event in events:
        if event.kind == "error" and not (found and found[-1][1] > event.at):
            restarts = (e.until or e.at for e in events if e.kind in RESTARTS and e.at > event.at)
            found.append((event.at, min(restarts, default=FOREVER)))
    return found


def _cut_kind(line: Timeline, event: Event, history: History) -> str | None:
    instance = line.instance[line.span(event.at, event.at)[0]]
    classes = {config["durability"] for config in line.ever(event.at, instance)}
    power = event.kind == "power" or any(end == (event.until or event.at) for _, end in line.latches)
    if power and "disk" in classes:
        line.skipped = min(line.skipped, event.at)
    if "ephemeral" in classes:
        return "wipe"
    if line.corrupted_at < event.at and turned_read_only(history, line.corrupted_at):
        return "fallback"
    if "memory" in classes and (power or event.kind == "kill"):
        return "fallback"
    return "tail" if power and "disk" in classes else None


def turned_read_only(history: History, since: int) -> bool:
    """Corruption in the log: the server shows what is before the damage, and refuses writes."""
    return any(
        op.status == 500 and op.sent_at > since and (op.answer["error"].get("detail") or {}).get("read_only")
        for op in history.ops
    )


# -- drops ---------------------------------------------------------------------------------------------------


def _drop_cuts(line: Timeline, ops: list[Op]) -> list[Cut]:
    cuts = []
    for op in ops:
        if op.kind == "drop" and not op.refused and not (op.ok and not op.answer["deleted"]):
            cuts.append(Cut(op.sent_at, line.settled(op), "drop", op.ok))
    cuts = _merged(cuts)
    return [cut for cut in cuts if cut.certain or not _outlived(line, cut, cuts, ops)]


def _outlived(line: Timeline, cut: Cut, cuts: list[Cut], ops: list[Op]) -> bool:
    """Whether something shows that a drop of unknown outcome was not executed: an older record still exists."""
    until = min((other.start for other in cuts if other.start > cut.end), default=FOREVER)
    old: set[str] = set()
    young: set[str] = set()
    for op in ops:
        if op.kind == "write" and not op.refused:
            side = old if line.settled(op) < cut.start else young
            side.update(
                repr(record.get("data", record.get("data_base64"))) for record in op.request["records"]
            )
    old -= young
    for op in ops:
        later = (
            op.kind in ("diff", "last") and op.ok and op.sent_at > cut.end and (op.answered_at or 0) < until
        )
        if later and any(repr(record.get("data")) in old for record in op.answer["records"]):
            return True
    return False


def _merged(cuts: list[Cut]) -> list[Cut]:
    """In order, and merged where they overlap: they are then one cut of the strongest kind."""
    found: list[Cut] = []
    rank = ("tail", "fallback", "wipe", "drop")
    for cut in sorted(cuts, key=lambda cut: cut.start):
        if not found or found[-1].end < cut.start:
            found.append(Cut(cut.start, cut.end, cut.kind, cut.certain))
            continue
        last = found[-1]
        kind = max(last.kind, cut.kind, key=rank.index)
        certain = any(each.certain for each in (last, cut) if each.kind == kind)
        last.end, last.kind, last.certain = max(last.end, cut.end), kind, certain
    return found


# -- configs -------------------------------------------------------------------------------------------------


def _settings(line: Timeline, ops: list[Op]) -> list[Setting]:
    there = _first_signs(line, ops)
    found = []
    for op in ops:
        if op.refused or op.kind not in ("put", "write", "put_router", "begin"):
            continue
        setting = Setting(op.sent_at, line.settled(op), op.ok, {})
        first, last = line.span(setting.sent, setting.settled)
        setting.first, setting.last = line.instance[first], line.instance[last]
        if op.kind == "put":
            setting.config = full_config(op.request)
        elif op.kind in ("put_router", "begin"):  # the topic may have existed
            if op.request.get("create") is False:
                continue
            if first == last and there.get(setting.first, FOREVER) < op.sent_at:
                continue
            setting.certain, setting.config = False, full_config(None)
        elif not may_create(op):
            continue
        elif not op.ok and first == last and there.get(setting.first, FOREVER) < op.sent_at:
            continue  # the topic existed when it came
        else:
            setting.config = full_config(op.request.get("config"))
        found.append(setting)
    return sorted(found, key=lambda setting: setting.sent)


def _first_signs(line: Timeline, ops: list[Op]) -> dict[int, int]:
    """By instance, when an answer first showed it."""
    found: dict[int, int] = {}
    for op in ops:
        if op.ok and op.answered_at is not None and op.kind not in ("drop", "list"):
            first, last = line.span(op.sent_at, op.answered_at)
            if first == last:
                instance = line.instance[first]
                found[instance] = min(found.get(instance, FOREVER), op.answered_at)
    return found


def _place_settings(line: Timeline) -> None:
    line._all_configs.clear()
    for setting in line.settings:
        first, last = line.span(setting.sent, setting.settled)
        setting.first, setting.last = line.instance[first], line.instance[last]


def may_create(op: Op) -> bool:
    """Whether a write can have created its topic."""
    if op.ok:
        return bool(op.answer["created"])
    create = op.request.get("create")
    if create is None:
        create = (op.request.get("config") or {}).get("auto_create", True)
    return bool(create)
