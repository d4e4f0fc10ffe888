"""Goal: the checker reports a router that loses, repeats, invents, miscounts or hides copies, under the right rule,
and nothing else.

Method: histories built by hand, as in test_checker, with a router of a few lines. A read of a dest copies first, as
it should; the test makes histories illegal by changing the server's state.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.support.checker import Unknown, assert_ok, check
from tests.support.checker.routers import long_form
from tests.support.checker.rules import filter_of
from tests.support.history import Op
from tests.support.scripted_server import Row, ScriptedServer, StoredTopic
from tests.unit.support.test_checker_batches import BatchServer

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
    """An existing router."""

    form: Row
    marks: dict[str, int] = field(default_factory=dict)
    total: int = 0


class RouterServer(ScriptedServer):
    """Records go from `a` to `b` by default."""

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
        for name, way in [*self.ways.items()] * 2:  # copies may be copied again
            source, dest = self.held[way.form["source"]], self.held[way.form["dest"]]
            mark = way.marks.get(way.form["source"], 0)
            for seq in sorted(source.live):
                if seq > mark:
                    self.copy_one(name, seq, way, source, dest)
            way.marks[way.form["source"]] = source.head

    def copy_one(self, name: str, seq: int, way: Way, source: StoredTopic, dest: StoredTopic) -> None:
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
            self.held.setdefault(topic, StoredTopic())
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
    server = RouterServer()
    server.write(2, "a", tag="x")
    server.route()
    server.write(3, "a", tag="x", node="n")
    server.write(1, "b", client="b")
    server.page()
    server.ask("router", "r")
    server.write(2, "a")
    server.ask("state", "b")
    server.page()
    server.ask("routers", "")
    server.ask("drop_router", "r")
    server.write(1, "a")
    server.page()
    server.ask("router", "r")
    server.ask("drop_router", "r")
    assert_ok(server.history)


def test_filters_and_what_stays_behind() -> None:
    server = RouterServer()
    server.route(filter="x*", preserve_tag=False, preserve_node=False)
    for tag in ("x.1", "y", None):
        server.write(1, "a", tag=tag, node="n")
    page = server.page()
    assert len(page.answer["records"]) == 1
    server.route("r", filter=["tag", "Eq", "y"], preserve_tag=False, preserve_node=False)
    server.write(1, "a", tag="y")
    server.page()
    server.ask("router", "r")
    assert_ok(server.history)


def test_a_chain_and_two_routers_of_one_way() -> None:
    server = RouterServer()
    server.route("r")
    server.route("s", filter="x")
    server.route("t", "b", "c", guarantee="exactly_once")
    server.write(2, "a", tag="x")
    assert len(server.page().answer["records"]) == 4
    server.page("c")
    server.ask("router", "t")
    assert_ok(server.history)


def test_whoever_says_that_it_did_not_wait_may_have_less() -> None:
    server = RouterServer()
    server.route()
    server.stuck = server.late = True
    server.write(2, "a")
    server.page()
    server.ask("router", "r")
    server.stuck = server.late = False
    server.page()
    assert_ok(server.history)


def test_a_full_dest_has_less_and_skips_nothing() -> None:
    server = RouterServer(dest={"discard": "reject", "cap_records": 2})
    server.route()
    server.write(2, "a")
    server.page()
    server.stuck = True
    server.write(2, "a")
    server.page()
    assert_ok(server.history)


def test_losses_of_the_source_are_holes_in_the_dest() -> None:
    server = RouterServer(source={"durability": "fsync", "cap_records": 2})
    server.route()
    server.write(1, "a")
    server.page()
    server.write(3, "a")
    trim(server, 2)
    server.page()
    server.page(from_seq=1)
    assert_ok(server.history)


def trim(server: RouterServer, *seqs: int) -> None:
    """The source loses these before they are copied, and the dest announces it."""
    source, dest = server.held["a"], server.held["b"]
    source.gaps = [(1, max(seqs), "cap")]
    for seq in range(1, max(seqs) + 1):
        source.live.pop(seq, None)
    dest.gaps = [(dest.head + 1, dest.head + len(seqs), "source_trim")]
    dest.head += len(seqs)


def test_copies_that_a_power_cut_took_come_again() -> None:
    server = RouterServer(dest={})
    server.route()
    server.write(3, "a")
    server.page()
    server.event("power")
    dest = server.held["b"]
    for seq in (2, 3):
        del dest.live[seq]
    dest.gaps = [(2, 9, "crash")]
    dest.head = 9
    server.ways["r"].marks["a"], server.ways["r"].total = 1, 1
    server.page()
    server.page(from_seq=1)
    server.ask("router", "r")
    assert_ok(server.history)


def test_a_source_in_memory_uses_its_seqs_again() -> None:
    server = RouterServer(source={"durability": "memory"})
    server.route()
    server.write(3, "a")
    server.page()
    server.event("kill", "a")
    server.held["a"] = StoredTopic(server.held["a"].config)
    server.ways["r"].marks["a"] = 0
    server.write(2, "a")
    server.page()
    server.page("a")
    assert_ok(server.history)


class CopiedBatches(BatchServer, RouterServer):
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
        self.held["t"] = StoredTopic(self.held["t"].config)
        self.ways["r"].marks["t"] = 0


def test_a_batch_that_begins_again_in_the_source_is_copied_again() -> None:
    server = CopiedBatches()
    server.append_and_copy(2)
    server.crash()
    server.lose(server.commit_sent)
    server.append_and_copy(3)
    server.event("calm")
    server.page("t")
    server.page()
    server.ask("router", "r")
    assert_ok(server.history)


def test_a_topic_takes_its_routers_with_it() -> None:
    server = RouterServer()
    server.route()
    server.write(2, "a")
    server.page()
    server.ask("drop", "b")
    server.ask("router", "r")
    server.route()
    server.write(1, "a")
    server.page()
    assert_ok(server.history)


def test_an_unknown_outcome_may_be_either() -> None:
    server = RouterServer()
    server.lose(server.send("put_router", "r", source="a", dest="b"), executed=True)
    server.write(2, "a")
    server.page()
    server.lose(server.send("drop_router", "r"))
    server.write(2, "a")
    server.page()
    server.stuck = True
    server.write(2, "a")
    server.page()
    assert_ok(server.history)


def test_circles() -> None:
    server = RouterServer()
    server.route(allow_cycle=True)
    server.route("back", "b", "a", allow_cycle=True)
    server.write(2, "a")
    assert len(server.page().answer["records"]) > 2
    server.page("a")
    assert_ok(server.history)


# -- broken --------------------------------------------------------------------------------------------------


def rules_of(server: RouterServer) -> set[str]:
    return {problem.rule for problem in check(server.history)}


def with_copies(count: int = 4, **form: Any) -> RouterServer:
    """Everything but the last page, which will be illegal."""
    server = RouterServer()
    server.route(**form)
    server.write(count, "a", tag="x", node="n")
    server.copy()
    return server


def shift(server: RouterServer, order: list[int]) -> None:
    """The copies of the dest in another order, or more or fewer of them."""
    dest = server.held["b"]
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
    server = with_copies()
    shift(server, order)
    server.ways["r"].total = len(order)
    server.page()
    if "total" in rule:
        server.ask("router", "r")
    found = rules_of(server)
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
    server = with_copies()
    server.held["b"].live[2] |= change
    server.page()
    assert rule in rules_of(server)


@pytest.mark.parametrize("flag", ["preserve_tag", "preserve_node"])
def test_a_copy_with_what_should_stay_behind(flag: str) -> None:
    server = with_copies(**{flag: False})
    server.held["b"].live[1]["$tag" if flag == "preserve_tag" else "$node"] = "x"
    server.page()
    assert "altered" in rules_of(server)


def test_a_record_that_the_filter_does_not_let_through() -> None:
    server = with_copies(filter="y*")
    assert server.held["b"].head == 0
    way = server.ways["r"]
    way.form = way.form | {"filter": None}
    server.copy_one("r", 1, way, server.held["a"], server.held["b"])
    way.form = way.form | {"filter": "y*"}
    server.page()
    assert "invented" in rules_of(server)


def test_a_batch_that_is_copied_more_often_than_it_began() -> None:
    server = CopiedBatches()
    server.append_and_copy(2)
    server.crash()
    server.lose(server.commit_sent)
    server.append_and_copy(3)
    server.ways["r"].marks["t"] = 0
    server.copy()
    server.event("calm")
    server.page()
    assert "copied-twice" in rules_of(server)


def test_a_batch_that_is_copied_again_after_its_end() -> None:
    server = CopiedBatches()
    server.append_and_copy(3)
    server.reply(server.commit_sent, (200, server.committed(f"{1:016x}")))
    server.crash()
    server.append_and_copy(3)
    server.page()
    assert "copied-twice" in rules_of(server)


@pytest.mark.parametrize("durability", ["memory", "disk", "fsync"])
def test_a_batch_that_is_copied_again_though_its_source_has_it(durability: str) -> None:
    server = CopiedBatches(durability)
    server.append_and_copy(2)
    server.event("kill", "t")
    server.lose(server.commit_sent)
    server.append(1, server.chunks[2:])
    server.ways["r"].marks["t"] = 0
    server.copy()
    server.event("calm")
    server.page()
    assert "copied-twice" in rules_of(server)


def test_a_record_from_before_the_router() -> None:
    server = RouterServer()
    server.write(2, "a")
    server.route()
    server.ways["r"].marks["a"] = 1
    server.page()
    assert "invented" in rules_of(server)


def test_a_copy_after_the_end_of_its_router() -> None:
    server = with_copies()
    way = server.ways["r"]
    server.ask("drop_router", "r")
    server.write(1, "a")
    server.copy_one("r", 5, way, server.held["a"], server.held["b"])
    server.page()
    assert "invented" in rules_of(server)


def test_a_copy_in_a_dest_that_was_made_again() -> None:
    server = with_copies()
    way = server.ways["r"]
    server.page()
    server.ask("drop", "b")
    server.ask("put", "b", **FSYNC)
    server.copy_one("r", 4, way, server.held["a"], server.held["b"])
    server.page()
    assert "dropped-visible" in rules_of(server)


def test_a_look_that_is_too_early() -> None:
    for kind in ("state", "diff"):
        server = with_copies(1)
        server.page()
        server.write(1, "a")
        server.stuck = True
        server.ask(kind, "b", **({"from_seq": 1} if kind == "diff" else {}))
        server.stuck = False
        server.page()
        assert rules_of(server) == {"stale"}


def test_a_chain_of_which_the_end_is_missing() -> None:
    server = RouterServer()
    server.route("r")
    server.route("s", "b", "c")
    server.write(3, "a")
    server.page("b")
    server.held["c"] = StoredTopic()
    server.page("c")
    assert rules_of(server) == {"copy-missing"}


def test_a_full_dest_that_skips_a_record() -> None:
    server = RouterServer(dest={**FSYNC, "discard": "reject", "cap_records": 3})
    server.route()
    server.write(4, "a")
    server.copy()
    shift(server, [1, 2, 4])
    server.page()
    assert "copy-skipped" in rules_of(server)


def test_a_loss_of_the_source_that_is_not_announced() -> None:
    server = RouterServer(source={**FSYNC, "cap_records": 2})
    server.route()
    server.write(1, "a")
    server.page()
    server.write(3, "a")
    source = server.held["a"]
    source.gaps, source.live = [(1, 2, "cap")], {seq: source.live[seq] for seq in (3, 4)}
    server.page()
    assert "copy-skipped" in rules_of(server)


def test_a_loss_that_no_source_can_have_had() -> None:
    server = with_copies()
    dest = server.held["b"]
    dest.gaps, dest.head = [(5, 6, "source_trim")], 6
    server.page(from_seq=4)
    assert "tombstone" in rules_of(server)


@pytest.mark.parametrize(
    ("totals", "is_wrong"), [((4, 4), False), ((4, 3), True), ((5, 5), True), ((3, 4), True)]
)
def test_totals(totals: tuple[int, int], is_wrong: bool) -> None:
    server = with_copies()
    for total in totals:
        server.ways["r"].total = total
        server.ask("router", "r")
        server.ask("routers", "")
    assert rules_of(server) == ({"total"} if is_wrong else set())


def test_a_total_that_a_restart_took() -> None:
    server = with_copies()
    server.ask("router", "r")
    server.event("kill", "b")
    server.ways["r"].total = 2
    server.late = True
    server.ask("router", "r")
    assert rules_of(server) == {"total"}


@pytest.mark.parametrize(
    "change",
    [{"source_seq": 3}, {"source_topic": "c"}, {"router": "s"}, {"idempotency_key": "router:r:7:0:9"}],
)
def test_an_origin_that_is_not_true(change: Row) -> None:
    server = with_copies(guarantee="exactly_once")
    assert_ok(server.history)
    server.held["b"].live[2]["meta"]["_topics_router"] |= change
    server.page()
    assert rules_of(server) == {"origin"}


def test_an_origin_that_nobody_asked_for() -> None:
    server = with_copies()
    way = server.ways["r"]
    way.form = way.form | {"guarantee": "exactly_once"}
    server.write(1, "a")
    server.copy()
    way.form = way.form | {"guarantee": "at_least_once"}
    server.page()
    assert rules_of(server) == {"origin"}


def test_a_router_that_goes_and_comes_by_itself() -> None:
    server = with_copies()
    way = server.ways.pop("r")
    server.ask("router", "r")
    assert rules_of(server) == {"existence"}
    server = with_copies()
    server.ask("drop_router", "r")
    server.ways["r"] = way
    server.ask("router", "r")
    assert rules_of(server) == {"existence"}


def test_a_router_that_says_what_nobody_asked_for() -> None:
    for change in ({"filter": ["tag", "Eq", "x"]}, {"guarantee": "exactly_once"}, {"dest": "c"}):
        server = with_copies()
        way = server.ways["r"]
        answer = server.ask("router", "r").answer
        answer |= change
        assert way.form != answer
        assert "router" in rules_of(server)


def test_a_drop_that_names_other_routers() -> None:
    for named in ([], ["s"], ["r", "r"]):
        server = with_copies()
        server.ask("drop", "b").answer["routers_removed"] = named
        assert rules_of(server) == {"router"}


def test_too_many_of_a_circle() -> None:
    server = RouterServer()
    server.route(allow_cycle=True)
    server.route("back", "b", "a", allow_cycle=True)
    server.write(1, "a")
    server.stuck = True
    way = server.ways["r"]
    for _ in range(10):
        server.copy_one("r", 1, way, server.held["a"], server.held["b"])
    server.page()
    assert rules_of(server) == {"ring"}


def test_unsupported_histories_are_refused() -> None:
    server = RouterServer()
    server.route(speed="fast")
    with pytest.raises(Unknown):
        check(server.history)
