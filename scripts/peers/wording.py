"""Fixed texts of the benchmark page."""

from __future__ import annotations

WORK_NAMES = {
    "single": "write of one record",
    "batch": "write of 100 records",
    "read": "read of 1000 records",
    "lone": "lone write, one every 2 ms",
    "pooled": "write of one record, 500 topics",
    "write": "write of one record",
    "diff": "diff",
}

WORK_TITLES = {
    "single": "Single-record writes",
    "batch": "Batches of 100",
    "read": "Reads of 1000",
    "pooled": "Writes to 500 topics",
}

PACED_NAMES = {
    "lone": "write of one record",
    "caught-up": "read that finds nothing",
    "diff": "read of one new record",
}

DURABILITY = {
    "fsync": "`fsync` (synced before the answer)",
    "disk": "`disk` (written before the answer, synced later)",
}

# Settings of the peers for comparable durability.
PEER_SETTING = {
    ("redis", "fsync"): ", `always`",
    ("redis", "disk"): ", `everysec`",
    ("nats", "fsync"): ", sync `always`",
    ("nats", "disk"): ", default sync",
}

LOADS = {"idle": "idle", "lone": "one write at a time", "half": "half load"}

PROTOCOL_SYSTEM = {"http": "topics", "resp": "redis", "nats": "nats"}

# Prefixes of the names of comparisons, and their names among the key figures.
KEY_FIGURES = {
    "single, fsync": "writes of one record, synced",
    "single, disk": "writes of one record, not synced",
    "batch, fsync": "batches of 100, synced",
    "batch, disk": "batches of 100, not synced",
    "read": "reads of 1000",
    "pooled": "writes to 500 topics",
    "lone": "p50 of a lone write",
    "queue, fsync": "jobs of a queue, synced",
    "queue, disk": "jobs of a queue, not synced",
    "write to waiting reader": "latency to a waiting reader",
    "fan-out, lock-step": "1 to 1000 watchers, one record at a time",
    "fan-out, burst": "1 to 1000 watchers, in bursts",
    "one source": "copies to 1 to 100 destinations",
}

KEY_RATIOS = (
    "Key figures: the lowest and the highest ratio over all numbers of clients and record sizes. Above 1, topics is faster; "
    "below 1, the other."
)

OPENING = (
    "The same work on the same machine and disk, at comparable durability; the systems take turns. Measured {dates} on {cores} cores of "
    "{machine}, shared by server and load generator. Later changes to the code are not included. Ratios are more portable than "
    "times, but depend on the cores, the disk and the build of Python. All raw results are in [results.json](benchmarks/results.json)."
)

RATIO = (
    "A ratio is the median over all rounds of ours / theirs in the same round, so it may differ from the quotient of the two "
    "medians next to it. Higher is better for rates, lower for latencies."
)

BEHIND = "In this table a ratio below 1 always means behind: ours / theirs for a rate, theirs / ours for a latency."

WORK_REQUESTS = {
    "single": (
        "One record per request, acknowledged before the same client sends the next one. topics: one POST. "
        "Redis: one XADD. NATS: one PUB with its acknowledgement."
    ),
    "batch": (
        "100 records at once. topics: one POST of 100 records, `return_seqs=false`. Redis: 100 XADD in one pipeline. "
        "NATS: 100 PUB in a row, then 100 acknowledgements. The latency is that of all 100 together. The POST is atomic; "
        "Redis' MULTI/EXEC and NATS' atomic batches are not measured. NATS with sync `always` syncs for every message, "
        "which is what its ratio shows."
    ),
    "read": (
        "Each client goes through a log of 10,000 records, 1000 at a time and again from the start, each from another place. "
        "topics: one POST to `diff` with limit 1000. Redis: XRANGE from an id, COUNT 1000. NATS: a direct get of a batch of "
        "1000 from a sequence; its clients usually read through a consumer. The records of every answer are counted."
    ),
    "pooled": (
        "One record per request, to 500 topics or streams in turn, by 32 connections that are shared by all of them, as a pool "
        "of connections does. NATS is not measured: it would need 500 streams."
    ),
}

PACED = (
    "One client that sends one request every 2 ms. The server's processes sleep between two requests, and waking them is part "
    "of the latency; a client that sends the next request at once keeps them awake and measures less. Each cell has "
    "**p50** / p90 / p99 in milliseconds. A write: as below, with one client. A read that finds nothing: of a topic of 10,000 "
    "records, from its end. A read of one new record: a record is written, and 2 ms later read from where the reader stopped; "
    "only the read counts. topics: a POST to `diff` with limit 1000; Redis: XRANGE from an id, COUNT 1000. Below 1 ×, topics is "
    "faster."
)

EARLIER_GENERATOR = (
    "> **Measured with an earlier load generator**, which was written in Python: it used up to a whole core with Redis and "
    "limited it in part, and added to short latencies. Reads were always of the first 1000 of 10,000 records, and waiting "
    "readers were measured once and not in rounds."
)

CELLS = "Each cell has **records per second**, and p50 / p99 / p99.9 of a request in milliseconds."

TAIL = (
    "From just before the write is sent until a waiting reader has the record, in milliseconds: "
    "**p50 / p99 / p99.9**. topics: diff with a long poll. Redis: XREAD BLOCK. NATS: push consumer. Half load: writes "
    "at half of the system's maximum rate, so a faster system is measured with more writes."
)

FANOUT = (
    "One stream, one writer, and N watchers that each receive everything, each on its own connection; records "
    "of 100 B. In memory only on all sides: topics' class `ephemeral` with a session and an event stream (SSE) per watcher, "
    "Redis without its log and with XREAD BLOCK, repeated after each response, NATS core without JetStream and a plain SUB. "
    "`topics, disk` is the same with the class `disk`. After each measurement it is verified that each watcher "
    "received each record exactly once."
)

SHAPES = {"lock-step": "One record at a time", "burst": "In bursts"}

SHAPE_CELLS = {
    "lock-step": (
        "The next record is sent when all watchers have received the previous one (and, for topics and Redis, when it is acknowledged; NATS "
        "core has no acks). Each cell has **deliveries per second**, and p50 / p99 in milliseconds, from just before the write is "
        "sent until a watcher has the record."
    ),
    "burst": (
        "Batches of 100 (topics: one POST, Redis: a pipeline, NATS: 100 PUB and a PING), each sent when the previous one is "
        "acknowledged and watchers are on average at most 300 records behind. Records may reach a watcher "
        "in larger chunks. Each cell has **records delivered per second**, summed over all watchers."
    ),
}

DELIVERY = (
    "CPU time of all processes of the server per record and watcher, including the write; and the share of "
    "a core used by the load generator, which is one single-threaded process for all watchers. With few watchers the "
    "write dominates."
)

QUEUE = (
    "Jobs of 100 B are produced, claimed 8 at a time, and acknowledged, which removes them, by N workers with a connection "
    "each; 4 producers send batches of 100 whenever fewer than 2000 jobs are queued or in flight. "
    "topics: a queue, POST to `claim` with `max` 8, one POST to `ack` with all 8. Redis: a consumer group, XREADGROUP COUNT 8, "
    "then XACK and XDEL of all 8 in one pipeline: XACK alone leaves the job in the stream, and in the other two an ack removes "
    "it. NATS: a work-queue stream with a durable pull consumer, a fetch of 8, then 8 explicit acks in a row, each with a reply, "
    "as the other two answer; with sync `always` it syncs for every message and for every ack. A claim waits for jobs on all sides. Redis also logs who holds which job; topics keeps that "
    "in memory unless a queue has `leases_durable`, which is off here. After each measurement it is verified "
    "that every job was delivered once and none is left."
)

QUEUE_CELLS = (
    "Each cell has **jobs per second**, from producing to the acknowledged ack, and p50 / p99 in milliseconds of a claim and "
    "of an ack, each of up to 8 jobs."
)

JOB_COST = (
    "CPU time of all processes of the server per job, including its write, claim and ack; the number of jobs per claim "
    "(below 8 the producers were the limit); and the share of a core used by the load generator, "
    "one single-threaded process for producers and workers."
)

WAITING = (
    "topics alone (`disk`, 100 B): one worker claims 8 jobs and acks them, while one producer adds as many, so that the "
    "length of the queue is constant. Three queues of one server, alternating. A cost that does not grow stays at 1 ×."
)

FORWARD = (
    "One source and N destinations, each of which gets a copy of every record; records of 100 B, `disk`. topics: a router for each dest, "
    "on a server with two workers. NATS: a stream for each dest, with the source among its `sources`, default sync. "
    "Redis Streams has no forwarding: the writer adds each record to the source and to all dests in one MULTI/EXEC, as its users do, so its acks "
    "wait for all copies. After each measurement it is verified that every destination has each record of the source "
    "exactly once."
)

FORWARD_ACKS = (
    "50 writes per second of one record each, for any number of dests. Each cell has **p50 / p99** of an ack in milliseconds, "
    "the ratio of p50 to that of the same system without dests in the same round, and the acknowledged writes per "
    "second. Writers of topics and NATS do not wait for copies, but all share the cores with them."
)

FORWARD_COPIES = (
    "4 clients send batches of 100 as fast as possible, until the time is over or a million copies are due. Each cell has "
    "**copies per second**, from the first write until every dest has all of them, the records per second acknowledged "
    "at the source, and the ratio of the latter to those without dests in the same round."
)

FORWARD_COST = (
    "CPU time of all processes of the server per copy, including the write to the source, from the first batch until all "
    "dests have everything; and the share of a core used by the load generator."
)

LAG = (
    "topics alone: one writer, a watcher (SSE) of the source and one of its only dest, in milliseconds. The next record is sent when both have "
    "received the previous one and it is acknowledged. The added latency is the time between the two for the same record; "
    "its p50 is not exactly the difference of the other two."
)

PROCESSOR = (
    "Of all processes of the server, without the load generator. This determines the throughput if the CPU is the "
    "bottleneck; for topics, front and worker are two processes."
)

SCALING = (
    "One topics server with more workers (`disk`, 100 B; 64 clients for single writes, 16 for batches, each with its own "
    "topic), on {cores} cores shared by front, workers and load generator. So this shows the cost of additional workers "
    "without additional cores, not how the server scales; each row is one measurement."
)

BACKLOG = (
    "The same requests to topics of different sizes (`disk`, 100 B, 16 clients; writes of one record, diffs of "
    "100 records from the middle). A cost that does not grow stays at 1 ×. Each row is one measurement, the smallest topic "
    "first: values below 1 × are noise."
)

STAGES = (
    "The path of a write through the server, and on to a waiting reader. A stage with a slash in its name is a part of the "
    "stage before the slash. The budget is the expectation of the design. Only writes with a waiting reader are counted. At half load "
    "the instrumentation slows down the server: that column shows the distribution of time; for actual latencies see "
    "the section on waiting readers."
)

GENERATOR = (
    "The same generator and the same bytes against a server that responds at once and stores nothing. Headroom is the ratio of that "
    "rate to the fastest rate measured with the same requests. The null server uses CPU time, too, so the "
    "generator alone is faster. Below 1.5 ×, or above 90 % of its core, it counts as near its limit."
)

READING = """\
- **Closed loop.** Each client sends a request, waits for the response, and sends again. So throughput and mean latency are two views \
of the same quantity, and a stall of the server also stops its clients: the tail is milder than with clients that do not wait.
- **Comparable durability.** `fsync`: the record is on the disk before the response (Redis `appendfsync always`, NATS \
`sync_interval: always`). `disk`: it is passed to the operating system, and a crash of the machine may lose what is not \
synced: topics starts a sync within 100 ms, Redis `everysec` within about a second, NATS by default within 2 minutes.
- **Taking turns.** Every point is measured in {rounds} rounds, {seconds:g} s together, after a warm-up. In each \
round the systems take turns, so that noise affects all of them. Values are medians over rounds; the thin bars in the plots \
span the worst and the best round. The sections on shards, backlog and stages are one measurement each.
- **What differs.** topics uses HTTP and JSON, the peers their own protocols; Redis keeps all data in memory in addition to \
its log file. What is read fits into memory, so no system waits for its disk. Each server runs on loopback with its data on the same disk, \
Redis without snapshots.
- **Checked.** Every answer is parsed: a refusal, a record too few or too many, or a job that comes twice ends a measurement without \
figures.
- **One load generator** for all systems (`scripts/load`, in C, one thread), a separate process on the same cores as the server. The \
processor time of a server is that of all its threads, from `/proc`."""

REPEAT = (
    "Needs a C compiler for the load generator, and idle cores. Uses `redis-server` and `nats-server` from the PATH; as root on Debian it installs the first with apt, and it installs "
    "the second into `.venv`. `PYTHON=/path/to/python` selects the interpreter, whose build matters "
    "([performance](performance.md)). A full run takes about an hour and overwrites this page; `--help` lists the "
    "options for a shorter or partial run, or another output directory; the page then says so."
)


def met_or_missed(met: bool, missed_by: float) -> str:
    if met:
        return "met"
    return f"**missed by {missed_by:.0%}**" if missed_by >= 0.01 else "**missed by less than 1%**"
