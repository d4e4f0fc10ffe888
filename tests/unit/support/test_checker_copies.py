"""Goal: the checker blames a router that loses, repeats, invents, miscounts or hides copies, by the right name, and nothing else.

Method: histories told by hand, as in test_checker, with a router of a few lines. A read of a dest copies first, as it should;
what is wrong is done behind its back.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.support.checker import Unknown, assert_ok, check
from tests.support.checker.routers import long_form
from tests.support.checker.rules import filter_of
from tests.support.checker_tale import Held, Row, Tale
from tests.support.history import Op
from tests.unit.support.test_checker_batches import BatchTale

FSYNC = {"durability": "fsync"}
FORM = ("source", "dest", "preserve_node", "preserve_tag", "filter", "allow_cycle", "guarantee")
DEFAULTS: Row = {
    "preserve_node": True,
    "preserve_tag": True,
    "filter": None,
    "allow_cycle": False,
    "guarantee": "at_least_once",
}


@dataclass
class Way:
    """A router that is there."""

    form: Row
    marks: dict[str, int] = field(default_factory=dict)
    total: int = 0


class RouterTale(Tale):
    """Records go from `a` to `b`, if nothing else is said."""

    def __init__(self, source: Row = FSYNC, dest: Row = FSYNC) -> None:
        super().__init__()
        self.ways: dict[str, Way] = {}
        self.stuck = False  # nothing is copied
        self.late = False
        self.ask("put", "a", **source)
        self.ask("put", "b", **dest)

    def route(self, name: str = "r", source: str = "a", dest: str = "b", **form: Any) -> Op:
        return self.ask("put_router", name, source=source, dest=dest, **form)

    def page(self, topic: str = "b", **request: Any) -> Op:
        return self.read(topic=topic, include_tags=True, **request)

    # -- the server ------------------------------------------------------------------------------------------

    def copy(self) -> None:
        for name, way in [*self.ways.items()] * 2:  # what was copied may be copied on
            source, dest = self.held[way.form["source"]], self.held[way.form["dest"]]
            mark = way.marks.get(way.form["source"], 0)
            for seq in sorted(source.live):
                if seq > mark:
                    self.copy_one(name, seq, way, source, dest)
            way.marks[way.form["source"]] = source.head

    def copy_one(self, name: str, seq: int, way: Way, source: Held, dest: Held) -> None:
        row = dict(source.live[seq])
        match = filter_of(way.form["filter"])
        if match is not None and not match(row.get("$tag")):
            return
        for field_name, kept in (("$tag", "preserve_tag"), ("$node", "preserve_node")):
            if not way.form[kept]:
                row.pop(field_name, None)
        if way.form["guarantee"] == "exactly_once":
            origin = {"router": name, "source_topic": way.form["source"], "source_topic_id": 7}
            origin |= {"source_epoch": 0, "source_seq": seq, "idempotency_key": f"router:{name}:7:0:{seq}"}
            row["meta"] = {**row.get("meta", {}), "_topics_router": origin}
        self.time += 1
        dest.head += 1
        dest.live[dest.head] = row | {"$seq": dest.head, "$ts": self.time}
        way.total += 1

    def do(self, op: Op) -> tuple[int, Any]:
        if op.kind in ("diff", "state", "last", "router") and not self.stuck:
            self.copy()
        status, answer = super().do(op)
        if self.late and op.kind in ("diff", "state", "router"):
            answer["performance"] = {"catch_up_timed_out": True}
        return status, answer

    def _put_router(self, op: Op) -> tuple[int, Row]:
        form = {name: op.request.get(name, DEFAULTS.get(name)) for name in FORM}
        form["filter"] = long_form(form["filter"])
        created = op.topic not in self.ways
        for topic in (form["source"], form["dest"]):
            self.held.setdefault(topic, Held())
        way = self.ways.setdefault(op.topic, Way(form, {form["source"]: self.held[form["source"]].head}))
        way.form = form
        return (201 if created else 200), {"router": op.topic, "created": created, **form}

    def _router(self, op: Op) -> tuple[int, Row]:
        if op.topic not in self.ways:
            return 404, {"error": {"code": "router_not_found", "message": "", "detail": {}}}
        way = self.ways[op.topic]
        return 200, {"router": op.topic, **way.form, "forwarded_total": way.total}

    def _routers(self, op: Op) -> tuple[int, Row]:
        rows = [
            {"router": name, "forwarded_total": way.total}
            | {key: way.form[key] for key in ("source", "dest", "guarantee")}
            for name, way in sorted(self.ways.items())
        ]
        return 200, {"routers": rows}

    def _drop_router(self, op: Op) -> tuple[int, Row]:
        return 200, {"router": op.topic, "deleted": self.ways.pop(op.topic, None) is not None}

    def _drop(self, op: Op) -> tuple[int, Row]:
        gone = [name for name, way in self.ways.items() if op.topic in (way.form["source"], way.form["dest"])]
        for name in gone:
            del self.ways[name]
        status, answer = super()._drop(op)
        return status, answer | {"routers_removed": sorted(gone)}


# -- legal ---------------------------------------------------------------------------------------------------


def test_a_life_of_a_router() -> None:
    tale = RouterTale()
    tale.write(2, "a", tag="x")
    tale.route()
    tale.write(3, "a", tag="x", node="n")
    tale.write(1, "b", client="b")
    tale.page()
    tale.ask("router", "r")
    tale.write(2, "a")
    tale.ask("state", "b")
    tale.page()
    tale.ask("routers", "")
    tale.ask("drop_router", "r")
    tale.write(1, "a")
    tale.page()
    tale.ask("router", "r")
    tale.ask("drop_router", "r")
    assert_ok(tale.history)


def test_filters_and_what_stays_behind() -> None:
    tale = RouterTale()
    tale.route(filter="x*", preserve_tag=False, preserve_node=False)
    for tag in ("x.1", "y", None):
        tale.write(1, "a", tag=tag, node="n")
    page = tale.page()
    assert len(page.answer["records"]) == 1
    tale.route("r", filter=["tag", "Eq", "y"], preserve_tag=False, preserve_node=False)
    tale.write(1, "a", tag="y")
    tale.page()
    tale.ask("router", "r")
    assert_ok(tale.history)


def test_a_chain_and_two_routers_of_one_way() -> None:
    tale = RouterTale()
    tale.route("r")
    tale.route("s", filter="x")
    tale.route("t", "b", "c", guarantee="exactly_once")
    tale.write(2, "a", tag="x")
    assert len(tale.page().answer["records"]) == 4
    tale.page("c")
    tale.ask("router", "t")
    assert_ok(tale.history)


def test_whoever_says_that_it_did_not_wait_may_have_less() -> None:
    tale = RouterTale()
    tale.route()
    tale.stuck = tale.late = True
    tale.write(2, "a")
    tale.page()
    tale.ask("router", "r")
    tale.stuck = tale.late = False
    tale.page()
    assert_ok(tale.history)


def test_a_full_dest_has_less_and_skips_nothing() -> None:
    tale = RouterTale(dest={"discard": "reject", "cap_records": 2})
    tale.route()
    tale.write(2, "a")
    tale.page()
    tale.stuck = True
    tale.write(2, "a")
    tale.page()
    assert_ok(tale.history)


def test_what_the_source_lost_is_a_hole_in_the_dest() -> None:
    tale = RouterTale(source={"durability": "fsync", "cap_records": 2})
    tale.route()
    tale.write(1, "a")
    tale.page()
    tale.write(3, "a")
    trim(tale, 2)
    tale.page()
    tale.page(from_seq=1)
    assert_ok(tale.history)


def trim(tale: RouterTale, *seqs: int) -> None:
    """The source loses these before they are copied, and the dest says so."""
    source, dest = tale.held["a"], tale.held["b"]
    source.gaps = [(1, max(seqs), "cap")]
    for seq in range(1, max(seqs) + 1):
        source.live.pop(seq, None)
    dest.gaps = [(dest.head + 1, dest.head + len(seqs), "source_trim")]
    dest.head += len(seqs)


def test_copies_that_a_power_cut_took_come_again() -> None:
    tale = RouterTale(dest={})
    tale.route()
    tale.write(3, "a")
    tale.page()
    tale.event("power")
    dest = tale.held["b"]
    for seq in (2, 3):
        del dest.live[seq]
    dest.gaps = [(2, 9, "crash")]
    dest.head = 9
    tale.ways["r"].marks["a"], tale.ways["r"].total = 1, 1
    tale.page()
    tale.page(from_seq=1)
    tale.ask("router", "r")
    assert_ok(tale.history)


def test_a_source_in_memory_uses_its_seqs_again() -> None:
    tale = RouterTale(source={"durability": "memory"})
    tale.route()
    tale.write(3, "a")
    tale.page()
    tale.event("kill", "a")
    tale.held["a"] = Held(tale.held["a"].config)
    tale.ways["r"].marks["a"] = 0
    tale.write(2, "a")
    tale.page()
    tale.page("a")
    assert_ok(tale.history)


class CopiedBatches(BatchTale, RouterTale):
    """A large batch for a topic that is copied, and that a crash empties."""

    def __init__(self, durability: str = "ephemeral") -> None:
        super().__init__()
        self.ask("put", durability=durability)
        self.route(source="t")
        self.commit_sent = self.send_commit(self.staged(chunks=3, size=2))
        self.chunks = list(self.txns.pop(f"{1:016x}").chunks.values())

    def append_and_copy(self, count: int) -> None:
        self.append(1, self.chunks[:count])
        self.copy()

    def crash(self) -> None:
        self.event("kill", "t")
        self.held["t"] = Held(self.held["t"].config)
        self.ways["r"].marks["t"] = 0


def test_a_batch_that_begins_again_in_the_source_is_copied_again() -> None:
    tale = CopiedBatches()
    tale.append_and_copy(2)
    tale.crash()
    tale.lose(tale.commit_sent)
    tale.append_and_copy(3)
    tale.event("calm")
    tale.page("t")
    tale.page()
    tale.ask("router", "r")
    assert_ok(tale.history)


def test_a_topic_takes_its_routers_with_it() -> None:
    tale = RouterTale()
    tale.route()
    tale.write(2, "a")
    tale.page()
    tale.ask("drop", "b")
    tale.ask("router", "r")
    tale.route()
    tale.write(1, "a")
    tale.page()
    assert_ok(tale.history)


def test_what_is_not_known_to_have_been_done_may_be_either() -> None:
    tale = RouterTale()
    tale.lose(tale.send("put_router", "r", source="a", dest="b"), executed=True)
    tale.write(2, "a")
    tale.page()
    tale.lose(tale.send("drop_router", "r"))
    tale.write(2, "a")
    tale.page()
    tale.stuck = True
    tale.write(2, "a")
    tale.page()
    assert_ok(tale.history)


def test_circles() -> None:
    tale = RouterTale()
    tale.route(allow_cycle=True)
    tale.route("back", "b", "a", allow_cycle=True)
    tale.write(2, "a")
    assert len(tale.page().answer["records"]) > 2
    tale.page("a")
    assert_ok(tale.history)


# -- broken --------------------------------------------------------------------------------------------------


def rules_of(tale: RouterTale) -> set[str]:
    return {problem.rule for problem in check(tale.history)}


def with_copies(count: int = 4, **form: Any) -> RouterTale:
    """All but the last page, in which something will be wrong."""
    tale = RouterTale()
    tale.route(**form)
    tale.write(count, "a", tag="x", node="n")
    tale.copy()
    return tale


def shift(tale: RouterTale, order: list[int]) -> None:
    """The copies of the dest in another order, or more or fewer of them."""
    dest = tale.held["b"]
    rows = [dest.live[seq] for seq in order]
    dest.head = len(rows)
    dest.live = {i: {**row, "$seq": i, "$ts": 2000 + i} for i, row in enumerate(rows, 1)}


@pytest.mark.parametrize(
    ("order", "rule"),
    [
        ([1, 2, 3], {"copy-missing", "total"}),
        ([1, 2, 4], {"copy-missing", "copy-skipped"}),
        ([1, 3, 2, 4], {"copy-order"}),
        ([1, 2, 2, 3, 4], {"copied-twice"}),
        ([], {"copy-missing"}),
    ],
)
def test_copies_that_are_not_there_once_and_in_order(order: list[int], rule: set[str]) -> None:
    tale = with_copies()
    shift(tale, order)
    tale.ways["r"].total = len(order)
    tale.page()
    if "total" in rule:
        tale.ask("router", "r")
    found = rules_of(tale)
    assert rule <= found
    assert found <= rule | {"copy-missing", "copy-skipped", "copied-twice"}


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"$tag": "y"}, "altered"),
        ({"$node": "m"}, "altered"),
        ({"meta": {"a": 1}}, "altered"),
        ({"data": {"w": "nobody", "i": 0, "of": 1}}, "invented"),
    ],
)
def test_a_copy_that_is_another_record(change: Row, rule: str) -> None:
    tale = with_copies()
    tale.held["b"].live[2] |= change
    tale.page()
    assert rule in rules_of(tale)


@pytest.mark.parametrize("flag", ["preserve_tag", "preserve_node"])
def test_a_copy_with_what_should_stay_behind(flag: str) -> None:
    tale = with_copies(**{flag: False})
    tale.held["b"].live[1]["$tag" if flag == "preserve_tag" else "$node"] = "x"
    tale.page()
    assert "altered" in rules_of(tale)


def test_a_record_that_the_filter_does_not_let_through() -> None:
    tale = with_copies(filter="y*")
    assert tale.held["b"].head == 0
    way = tale.ways["r"]
    way.form = way.form | {"filter": None}
    tale.copy_one("r", 1, way, tale.held["a"], tale.held["b"])
    way.form = way.form | {"filter": "y*"}
    tale.page()
    assert "invented" in rules_of(tale)


def test_a_batch_that_is_copied_more_often_than_it_began() -> None:
    tale = CopiedBatches()
    tale.append_and_copy(2)
    tale.crash()
    tale.lose(tale.commit_sent)
    tale.append_and_copy(3)
    tale.ways["r"].marks["t"] = 0
    tale.copy()
    tale.event("calm")
    tale.page()
    assert "copied-twice" in rules_of(tale)


def test_a_batch_that_is_copied_again_after_its_end() -> None:
    tale = CopiedBatches()
    tale.append_and_copy(3)
    tale.tell(tale.commit_sent, (200, tale.committed(f"{1:016x}")))
    tale.crash()
    tale.append_and_copy(3)
    tale.page()
    assert "copied-twice" in rules_of(tale)


@pytest.mark.parametrize("durability", ["memory", "disk", "fsync"])
def test_a_batch_that_is_copied_again_though_its_source_has_it(durability: str) -> None:
    tale = CopiedBatches(durability)
    tale.append_and_copy(2)
    tale.event("kill", "t")
    tale.lose(tale.commit_sent)
    tale.append(1, tale.chunks[2:])
    tale.ways["r"].marks["t"] = 0
    tale.copy()
    tale.event("calm")
    tale.page()
    assert "copied-twice" in rules_of(tale)


def test_a_record_from_before_the_router() -> None:
    tale = RouterTale()
    tale.write(2, "a")
    tale.route()
    tale.ways["r"].marks["a"] = 1
    tale.page()
    assert "invented" in rules_of(tale)


def test_a_copy_after_the_end_of_its_router() -> None:
    tale = with_copies()
    way = tale.ways["r"]
    tale.ask("drop_router", "r")
    tale.write(1, "a")
    tale.copy_one("r", 5, way, tale.held["a"], tale.held["b"])
    tale.page()
    assert "invented" in rules_of(tale)


def test_a_copy_in_a_dest_that_was_made_again() -> None:
    tale = with_copies()
    way = tale.ways["r"]
    tale.page()
    tale.ask("drop", "b")
    tale.ask("put", "b", **FSYNC)
    tale.copy_one("r", 4, way, tale.held["a"], tale.held["b"])
    tale.page()
    assert "dropped-visible" in rules_of(tale)


def test_a_look_that_is_too_early() -> None:
    for kind in ("state", "diff"):
        tale = with_copies(1)
        tale.page()
        tale.write(1, "a")
        tale.stuck = True
        tale.ask(kind, "b", **({"from_seq": 1} if kind == "diff" else {}))
        tale.stuck = False
        tale.page()
        assert rules_of(tale) == {"stale"}


def test_a_chain_of_which_the_end_is_missing() -> None:
    tale = RouterTale()
    tale.route("r")
    tale.route("s", "b", "c")
    tale.write(3, "a")
    tale.page("b")
    tale.held["c"] = Held()
    tale.page("c")
    assert rules_of(tale) == {"copy-missing"}


def test_a_full_dest_that_skips_a_record() -> None:
    tale = RouterTale(dest={**FSYNC, "discard": "reject", "cap_records": 3})
    tale.route()
    tale.write(4, "a")
    tale.copy()
    shift(tale, [1, 2, 4])
    tale.page()
    assert "copy-skipped" in rules_of(tale)


def test_a_loss_of_the_source_that_is_not_announced() -> None:
    tale = RouterTale(source={**FSYNC, "cap_records": 2})
    tale.route()
    tale.write(1, "a")
    tale.page()
    tale.write(3, "a")
    source = tale.held["a"]
    source.gaps, source.live = [(1, 2, "cap")], {seq: source.live[seq] for seq in (3, 4)}
    tale.page()
    assert "copy-skipped" in rules_of(tale)


def test_a_loss_that_no_source_can_have_had() -> None:
    tale = with_copies()
    dest = tale.held["b"]
    dest.gaps, dest.head = [(5, 6, "source_trim")], 6
    tale.page(from_seq=4)
    assert "tombstone" in rules_of(tale)


@pytest.mark.parametrize(
    ("totals", "is_wrong"), [((4, 4), False), ((4, 3), True), ((5, 5), True), ((3, 4), True)]
)
def test_totals(totals: tuple[int, int], is_wrong: bool) -> None:
    tale = with_copies()
    for total in totals:
        tale.ways["r"].total = total
        tale.ask("router", "r")
        tale.ask("routers", "")
    assert rules_of(tale) == ({"total"} if is_wrong else set())


def test_a_total_that_a_restart_took() -> None:
    tale = with_copies()
    tale.ask("router", "r")
    tale.event("kill", "b")
    tale.ways["r"].total = 2
    tale.late = True
    tale.ask("router", "r")
    assert rules_of(tale) == {"total"}


@pytest.mark.parametrize(
    "change",
    [{"source_seq": 3}, {"source_topic": "c"}, {"router": "s"}, {"idempotency_key": "router:r:7:0:9"}],
)
def test_an_origin_that_is_not_true(change: Row) -> None:
    tale = with_copies(guarantee="exactly_once")
    assert_ok(tale.history)
    tale.held["b"].live[2]["meta"]["_topics_router"] |= change
    tale.page()
    assert rules_of(tale) == {"origin"}


def test_an_origin_that_nobody_asked_for() -> None:
    tale = with_copies()
    way = tale.ways["r"]
    way.form = way.form | {"guarantee": "exactly_once"}
    tale.write(1, "a")
    tale.copy()
    way.form = way.form | {"guarantee": "at_least_once"}
    tale.page()
    assert rules_of(tale) == {"origin"}


def test_a_router_that_goes_and_comes_by_itself() -> None:
    tale = with_copies()
    way = tale.ways.pop("r")
    tale.ask("router", "r")
    assert rules_of(tale) == {"existence"}
    tale = with_copies()
    tale.ask("drop_router", "r")
    tale.ways["r"] = way
    tale.ask("router", "r")
    assert rules_of(tale) == {"existence"}


def test_a_router_that_says_what_nobody_asked_for() -> None:
    for change in ({"filter": ["tag", "Eq", "x"]}, {"guarantee": "exactly_once"}, {"dest": "c"}):
        tale = with_copies()
        way = tale.ways["r"]
        answer = tale.ask("router", "r").answer
        answer |= change
        assert way.form != answer
        assert "router" in rules_of(tale)


def test_a_drop_that_names_other_routers() -> None:
    for named in ([], ["s"], ["r", "r"]):
        tale = with_copies()
        tale.ask("drop", "b").answer["routers_removed"] = named
        assert rules_of(tale) == {"router"}


def test_too_many_of_a_circle() -> None:
    tale = RouterTale()
    tale.route(allow_cycle=True)
    tale.route("back", "b", "a", allow_cycle=True)
    tale.write(1, "a")
    tale.stuck = True
    way = tale.ways["r"]
    for _ in range(10):
        tale.copy_one("r", 1, way, tale.held["a"], tale.held["b"])
    tale.page()
    assert rules_of(tale) == {"ring"}


def test_what_the_checker_was_not_made_for() -> None:
    tale = RouterTale()
    tale.route(speed="fast")
    with pytest.raises(Unknown):
        check(tale.history)
