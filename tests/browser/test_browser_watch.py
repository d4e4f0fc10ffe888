"""Goal: a page that follows topics gets every record exactly once and in order, whatever is restarted.

Method: a real browser with a page of the server's origin. Its EventSource reconnects by itself; the page opens its WebSocket
again, from its last position. The received records are compared with the server's.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.browser.clients import Stream, follow, new_session, open_socket, open_stream
from tests.crash.load import acks, load, read_all, topics_on
from tests.crash.processes import kill, stopped
from tests.support.browser import Page
from tests.support.faults import fault
from tests.support.length import pick
from tests.support.server import Server, until
from topics.link.event_ids import decode

pytestmark = pytest.mark.browser

OpenPage = Callable[[Server], Page]
StartServer = Callable[..., Server]

WRITES = pick(short=40, long=200)  # acknowledged before and after a fault
(ON_0,), (ON_1,) = topics_on(0, 2, 1), topics_on(1, 2, 1)


def write(server: Server, topic: str, data: str) -> None:
    """Write as soon as the topic's worker is ready."""
    until(lambda: server.write(topic, data).status == 200)


def make(server: Server, *topics: str) -> None:
    for topic in topics:
        assert server.put(f"/v0/topics/{topic}").status in (200, 201)


# -- EventSource ---------------------------------------------------------------------------------------------


def test_records_arrive_once_and_in_order_with_ids(
    shared_server: Server, topic: str, open_page: OpenPage
) -> None:
    other = f"{topic}.other"
    make(shared_server, topic, other)
    shared_server.write(topic, "stored")
    page = open_page(shared_server)
    stream = follow(page, topic, other)
    shared_server.write(topic, "a", {"b": ["ü", 1.50]})
    shared_server.write(other, "c")
    stream.wait_for(other, "c")
    shared_server.write(topic, "end")
    stream.wait_for(topic, "end")
    assert stream.records(topic) == read_all(shared_server, topic)
    assert stream.records(other) == [(1, "c")]
    frames = stream.get("frames")
    assert {event for event, _, _ in frames} == {"record", "caught-up"}
    ids = [decode(last_event_id) for _, _, last_event_id in frames]
    assert None not in ids
    assert ids[-1] == (None, {topic: 4, other: 1})
    assert (stream.get("opened"), stream.get("broken")) == (1, 0)


def test_a_topic_that_is_made_later_joins_a_pattern(
    shared_server: Server, topic: str, open_page: OpenPage
) -> None:
    first, second, outside = f"{topic}.new.1", f"{topic}.new.2", f"{topic}.old"
    shared_server.write(first, "first")
    stream = follow(open_page(shared_server), f"{topic}.new.>")
    shared_server.write(outside, "not this")
    shared_server.write(second, "second", "third")
    stream.wait_for(second, "third")
    shared_server.write(first, "end")
    stream.wait_for(first, "end")
    assert stream.get("records") == [
        [first, 1, "first"], [second, 1, "second"], [second, 2, "third"], [first, 2, "end"],
    ]  # fmt: skip


def test_a_key_goes_into_the_url(start_fixed_port_server: StartServer, open_page: OpenPage) -> None:
    """EventSource cannot send headers, so here a key is allowed in a URL."""
    server = start_fixed_port_server(TOPICS_API_KEYS="reader:read,other:read,all")
    whole = {"Authorization": "Bearer all"}

    def write_with_key(data: str) -> None:
        reply = server.post("/v0/topics/t", {"records": [{"data": data}]}, **whole)
        assert reply.status in (200, 201), reply

    write_with_key("before")
    page = open_page(server)
    url = new_session(page, "t", token="reader")["stream_url"]
    for wrong in ("", "?token=other", "?token=wrong"):
        refused = open_stream(page, url + wrong, "refused")
        refused.page.wait("refused.gaveUp", shows="refused.summary")
        assert refused.get("opened") == 0
    stream = open_stream(page, f"{url}?token=reader")
    stream.wait_for("t", "before")
    kill(server.pid("front 0"))
    write_with_key("after")
    stream.wait_for("t", "after")
    assert stream.records("t") == [(1, "before"), (2, "after")]


# -- restarts ------------------------------------------------------------------------------------------------


def kill_everything(server: Server) -> None:
    server.kill()
    server.start()


def restart(server: Server) -> None:
    assert server.stop() == 0
    server.start()


def kill_the_front(server: Server) -> None:
    kill(server.pid("front 0"))


def kill_worker_0(server: Server) -> None:
    """The worker that holds the sessions."""
    kill(server.pid("shard 0"))


def kill_worker_1(server: Server) -> None:
    kill(server.pid("shard 1"))


RESUMES = "each EventSource reconnects by itself; its page gets every record once and in order"


@pytest.mark.crash
@pytest.mark.parametrize(
    "interrupt",
    [
                pytest.param(kill_everything, marks=fault("supervisor", "all processes are killed (-9) and started again while pages follow topics", RESUMES)),
                pytest.param(restart, marks=fault("supervisor", "the server is restarted (SIGTERM) while pages follow topics", RESUMES)),
                pytest.param(kill_the_front, marks=fault("front", "killed (-9) while pages follow topics", RESUMES)),
                pytest.param(kill_worker_0, marks=fault("worker", "the one with the sessions is killed (-9) while pages follow topics", RESUMES)),
                pytest.param(kill_worker_1, marks=fault("worker", "killed (-9) while pages follow its topics", RESUMES)),
    ],
)  # fmt: skip
def test_an_event_source_resumes(
    interrupt: Callable[[Server], None], start_fixed_port_server: StartServer, open_page: OpenPage
) -> None:
    server = start_fixed_port_server()
    make(server, ON_0, ON_1)
    stream = follow(open_page(server), ON_0, ON_1)
    with load(server, [ON_0, ON_1], front_dies=True) as writers:
        stream.wait(f"it.records.length >= {WRITES}")
        interrupt(server)
        target = acks(writers) + WRITES
        until(lambda: acks(writers) >= target)
    for topic in (ON_0, ON_1):
        write(server, topic, "end")
        stream.wait_for(topic, "end")
        assert stream.records(topic) == read_all(server, topic)
    events = {event for event, _, _ in stream.get("frames")}
    assert events == {"record", "caught-up"}
    if interrupt is restart:
        assert [error["code"] for error in stream.get("errors")] == ["server_shutting_down"]


@pytest.mark.crash
def test_an_event_source_resumes_without_a_saved_session(
    start_fixed_port_server: StartServer, open_page: OpenPage
) -> None:
    """Killed before anything of the stream was saved in its session: the id alone must tell where to resume."""
    server = start_fixed_port_server()
    make(server, ON_0)
    stream = follow(open_page(server), ON_0)
    server.write(ON_0, "before")
    stream.wait_for(ON_0, "before")
    kill_everything(server)
    write(server, ON_0, "after")
    stream.wait_for(ON_0, "after")
    assert stream.records(ON_0) == [(1, "before"), (2, "after")]


@pytest.mark.crash
def test_streams_on_other_shards_do_not_notice_a_worker_s_death(
    start_fixed_port_server: StartServer, open_page: OpenPage
) -> None:
    server = start_fixed_port_server()
    make(server, ON_0, ON_1)
    page = open_page(server)
    calm, struck = follow(page, ON_0, variable="calm"), follow(page, ON_1, variable="struck")
    kill(server.pid("shard 1"))
    write(server, ON_0, "meanwhile")
    calm.wait_for(ON_0, "meanwhile")
    write(server, ON_1, "after")
    struck.wait_for(ON_1, "after")
    assert (calm.get("opened"), calm.get("broken")) == (1, 0)
    assert calm.records(ON_0) == [(1, "meanwhile")]
    assert struck.records(ON_1) == [(1, "after")]


@pytest.mark.crash
@fault(
    "worker",
    "the one with the sessions is down when a page opens a stream",
    "the request waits until it is back",
)
def test_a_stream_that_is_opened_while_its_worker_is_away_waits(
    start_fixed_port_server: StartServer, open_page: OpenPage
) -> None:
    """A 503 would end the EventSource for good: see test_event_source.py."""
    server = start_fixed_port_server()
    make(server, ON_0, ON_1)
    server.write(ON_1, "stored")
    page = open_page(server)
    urls = [new_session(page, topic)["stream_url"] for topic in (ON_0, ON_1)]
    assert server.process is not None
    with stopped(server.process.pid):  # so that it is not restarted
        kill(server.pid("shard 0"))
        streams = [open_stream(page, url, f"stream{i}") for i, url in enumerate(urls)]
        page.run("fetch('/v0/health')")
        assert [stream.get("summary")["state"] for stream in streams] == [0, 0]
    streams[1].wait_for(ON_1, "stored")
    write(server, ON_0, "later")
    streams[0].wait_for(ON_0, "later")
    assert [_history(stream) for stream in streams] == [(1, 0), (1, 0)]


def _history(stream: Stream) -> tuple[int, int]:
    return stream.get("opened"), stream.get("broken")


# -- WebSocket -----------------------------------------------------------------------------------------------


@pytest.mark.crash
@pytest.mark.parametrize("interrupt", [kill_everything, restart, kill_the_front])
def test_a_web_socket_resumes_at_its_position(
    interrupt: Callable[[Server], None], start_fixed_port_server: StartServer, open_page: OpenPage
) -> None:
    server = start_fixed_port_server()
    make(server, ON_1)
    client = open_socket(open_page(server), ON_1)
    ack = client.publish("from the page", "and more")
    assert (ack["op"], ack["first_seq"], ack["last_seq"]) == ("ack", 1, 2)
    server.write(ON_1, "from outside")
    client.wait_for(ON_1, "from outside")
    interrupt(server)
    write(server, ON_1, "from outside, later")
    client.wait_for(ON_1, "from outside, later")
    ack = client.publish("end")
    assert (ack["op"], ack["seqs"]) == ("ack", [5])
    client.wait_for(ON_1, "end")
    assert client.records(ON_1) == read_all(server, ON_1)
    assert client.get("froms") == [0, 3]
    ops = client.get("ops")
    for connection in (1, 2):
        of_this = [op for number, op in ops if number == connection]
        assert of_this[0] == "subscribed"
        assert set(of_this) <= {"subscribed", "ack", "record", "caught_up", "error"}
    codes = [error["code"] for error in client.get("errors")]
    assert codes == (["server_shutting_down"] if interrupt is restart else [])
