"""The words of the benchmark page that do not depend on its figures."""

from __future__ import annotations

WORK_NAMES = {
    "single": "write of one record",
    "batch": "write of 100 records",
    "read": "read of 1000 records",
    "write": "write of one record",
    "diff": "diff",
}

WORK_TITLES = {
    "single": "Single-record writes",
    "batch": "Batches of 100",
    "read": "Reads of 1000 from the start",
}

DURABILITY = {
    "fsync": "`fsync` (synced before the answer)",
    "disk": "`disk` (written before the answer, synced later)",
}

# How each peer is set so that its promise equals ours.
PEER_SETTING = {
    ("redis", "fsync"): ", `always`",
    ("redis", "disk"): ", `everysec`",
    ("nats", "fsync"): ", sync `always`",
    ("nats", "disk"): ", default sync",
}

LOADS = {"idle": "idle", "lone": "one write at a time", "half": "half load"}

PROTOCOL_SYSTEM = {"http": "topics", "resp": "redis", "nats": "nats"}

# How the names of comparisons begin, and what the key figures call them.
KEY_FIGURES = {
    "single, fsync": "writes of one record, synced",
    "single, disk": "writes of one record, not synced",
    "batch, fsync": "batches of 100, synced",
    "batch, disk": "batches of 100, not synced",
    "read": "reads of 1000",
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
    "{machine}, shared by server and load generator. Later changes of the code are not in these figures. Ratios are more portable than "
    "times, but depend on the cores, the disk and the build of Python. All raw figures are in [results.json](benchmarks/results.json)."
)

RATIO = (
    "A ratio is the median over all rounds of ours / theirs in the same round, so it may differ from the quotient of the two "
    "medians next to it. Higher is better for rates, lower for latencies."
)

BEHIND = "In this table a ratio below 1 always means behind: ours / theirs for a rate, theirs / ours for a latency."

WORK_REQUESTS = {
    "single": (
        "One record a request, acknowledged before the same client sends the next. topics: one POST. "
        "Redis: one XADD. NATS: one PUB with its acknowledgement."
    ),
    "batch": (
        "100 records at once. topics: one POST of 100 records, `return_seqs=false`. Redis: 100 XADD in one pipeline. "
        "NATS: 100 PUB in a row, then 100 acknowledgements. The latency is that of all 100 together. The POST is atomic; "
        "Redis' MULTI/EXEC and NATS' atomic batches are not measured. NATS with sync `always` syncs for every message, "
        "which is what its ratio shows."
    ),
    "read": (
        "The first 1000 records of the log. topics: one POST to `diff` with limit 1000. Redis: XRANGE - + COUNT 1000. "
        "NATS: a direct get of a batch of 1000 from the first sequence; its clients usually read through a consumer."
    ),
}

CELLS = "A cell is **records a second** above p50 / p99 / p99.9 of a request in milliseconds."

TAIL = (
    "From just before the write is sent until a reader that already waits has the record, in milliseconds: "
    "**p50 / p99 / p99.9**. topics: diff with a long poll. Redis: XREAD BLOCK. NATS: push consumer. Half load: writes "
    "at half the rate that the system can take, so that a faster system is measured under more writes."
)

FANOUT = (
    "One stream, one writer, and N watchers that each see everything, each on its own connection; records "
    "of 100 B. In memory only on all sides: topics' class `ephemeral` with a session and an event stream (SSE) a watcher, "
    "Redis without its log and XREAD BLOCK, asked again after each answer, NATS core without JetStream and a plain SUB. "
    "`topics, disk` is the same with the class `disk`. After each measurement it is checked that no watcher lost a record "
    "or saw one twice."
)

SHAPES = {"lock-step": "One record at a time", "burst": "In bursts"}

SHAPE_CELLS = {
    "lock-step": (
        "The next record is sent when all watchers have seen the last (topics and Redis: and it is acknowledged; NATS "
        "core does not). A cell is **deliveries a second** above p50 / p99 in milliseconds, from just before the write is "
        "sent until a watcher has the record."
    ),
    "burst": (
        "Batches of 100 (topics: one POST, Redis: a pipeline, NATS: 100 PUB and a PING), each sent when the last is "
        "acknowledged and watchers are on average at most 300 records behind. What reaches a watcher may be "
        "joined to larger pieces. A cell is **records delivered a second**, of all watchers together."
    ),
}

DELIVERY = (
    "Processor time of all processes of the server for one record to one watcher, the write included; and the share of "
    "a core that the load generator took, which is one process with one thread for all watchers. For few watchers the "
    "write itself is most of it."
)

QUEUE = (
    "Jobs of 100 B are produced, claimed 8 at a time, and acknowledged, which removes them, by N workers with a connection "
    "each; 4 producers send batches of 100 whenever fewer than 2000 jobs are queued or in flight. "
    "topics: a queue, POST to `claim` with `max` 8, one POST to `ack` with all 8. Redis: a consumer group, XREADGROUP COUNT 8, "
    "then XACK and XDEL of all 8 in one pipeline: XACK alone leaves the job in the stream, and in the other two an ack removes "
    "it. NATS: a work-queue stream with a durable pull consumer, a fetch of 8, then 8 explicit acks in a row, each with a reply, "
    "as the other two answer; with sync `always` it syncs for every message and for every ack. A claim waits for jobs on all sides. Who holds which job is in Redis' log too; topics keeps it "
    "in memory unless a queue has `leases_durable`, which is off here. After each measurement it is checked "
    "that every job was delivered once and none is left."
)

QUEUE_CELLS = (
    "A cell is **jobs a second**, from producing to the acknowledged ack, above p50 / p99 in milliseconds of a claim and "
    "of an ack, each of up to 8 jobs."
)

JOB_COST = (
    "Processor time of all processes of the server for one job, its write, claim and ack together; how many jobs a claim "
    "brought (below 8 the producers were the limit); and the share of a core that the load generator took, "
    "one process with one thread for producers and workers."
)

WAITING = (
    "topics alone (`disk`, 100 B): one worker claims 8 jobs and acks them, while one producer adds as many, so that the "
    "queue keeps its length. Three queues of one server, in turns. A cost that does not grow stays at 1 ×."
)

FORWARD = (
    "One source and N destinations, each of which gets a copy of every record; records of 100 B, `disk`. topics: a router for each dest, "
    "on a server with two workers. NATS: a stream for each dest, with the source among its `sources`, default sync. "
    "Redis Streams has no such thing: the writer adds each record to the source and to all dests in one MULTI/EXEC, as its users do, so its acks "
    "wait for all copies. After each measurement it is checked that every destination has each record of the source "
    "once."
)

FORWARD_ACKS = (
    "50 writes a second of one record each, whatever the number of dests. A cell is **p50 / p99** of an ack in milliseconds, above "
    "p50 over that of the same system without dests in the same round, and the writes a second that were "
    "acknowledged. No writer of topics or NATS waits for copies, but all share the cores with them."
)

FORWARD_COPIES = (
    "4 clients send batches of 100 without a pace, for as long as a measurement takes or until a million copies are due. A cell is "
    "**copies a second**, from the first write until every dest has all, above the records a second that were acknowledged "
    "meanwhile at the source, and these over those without dests in the same round."
)

FORWARD_COST = (
    "Processor time of all processes of the server for one copy, the write of its source included, while batches are sent and until all "
    "dests have all; and the share of a core that the load generator took."
)

LAG = (
    "topics alone: one writer, a watcher (SSE) of the source and one of its only dest, in milliseconds. The next record is sent when both have "
    "seen the last and it is acknowledged. What a copy adds is the time between the two for the same record, and its "
    "p50 so not always the difference of the two beside it."
)

PROCESSOR = (
    "Of all processes of the server, without the load generator. Where throughput is bound by cores, this is what "
    "decides it; for topics the front and the worker are two processes."
)

SCALING = (
    "One topics server with more workers (`disk`, 100 B; 64 clients for single writes, 16 for batches, each with a topic of "
    "its own), on {cores} cores that front, workers and load generator share. So this shows what a further worker costs "
    "where there is no core for it, not how the server scales; each row is one measurement."
)

BACKLOG = (
    "The same requests to a topic that already holds so many records (`disk`, 100 B, 16 clients; writes of one record, diffs of "
    "100 records from the middle). A cost that does not grow stays at 1 ×. Each row is one measurement, the smallest topic "
    "first: what is below 1 × is noise of the machine, not a gain."
)

STAGES = (
    "One write through the server, and on to a waiting reader. A stage named with a slash is a part of the one before "
    "the slash. The budget is what the design expected. Only writes that met a waiting reader are counted, and at half load "
    "the marks that measure it slow the server: that column shows where time goes, not how long a write takes, which is "
    "in the section on waiting readers."
)

GENERATOR = (
    "The same generator and the same bytes against a server that answers at once and keeps nothing. Headroom is that "
    "rate over the fastest rate measured with the same requests. The null server takes processor time too, so the "
    "generator alone is faster than this. Below 1.5 ×, or above 90 % of its core, it counts as near its limit."
)

READING = """\
- **Closed loop.** Each client sends, waits for the answer, and sends again. So throughput and mean latency are two views \
of one figure, and a stall of the server also stops its clients: the tail is milder than for clients that do not wait.
- **Comparable durability.** `fsync`: the record is on the disk before the answer (Redis `appendfsync always`, NATS \
`sync_interval: always`). `disk`: it is handed to the operating system, and a crash of the machine may lose what was not \
synced: topics begins a sync within 100 ms, Redis `everysec` within about a second, NATS by default within 2 minutes.
- **Taking turns.** Every point of the three works is measured in {rounds} rounds, {seconds:g} s together, after a warm-up. In a \
round each system has its turn, so that noise hits all alike. Figures are medians over rounds; the thin bars in the plots \
reach from the worst round to the best. Fan-out, queues and copies take turns in the same way. The sections on waiting readers, shards, backlog and stages are one measurement each.
- **What differs.** topics speaks HTTP and JSON, the peers protocols of their own; Redis keeps the log in memory and \
its file beside it. The same first 1000 of 10,000 records are read again and again, so no system waits for its disk. Each server runs on loopback with its data on the same disk, \
Redis without snapshots.
- **One generator** for all, in a process of its own on the same cores as the server. Beside Redis it takes up to a whole core, \
beside topics, whose two processes need the rest, less."""

REPEAT = (
    "Uses `redis-server` and `nats-server` from the PATH; as root on Debian it installs the first with apt, and it installs "
    "the second into `.venv`. `PYTHON=/path/to/python` chooses the interpreter, whose build matters "
    "([performance](performance.md)). A whole run takes about an hour and overwrites this page; `--help` lists the "
    "options for a shorter run, for a part of it, or for another place; the page then says so."
)


def met_or_missed(met: bool, missed_by: float) -> str:
    if met:
        return "met"
    return f"**missed by {missed_by:.0%}**" if missed_by >= 0.01 else "**missed by less than 1%**"
