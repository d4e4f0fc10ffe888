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
    "disk": "`disk` (written before the answer, synced soon after)",
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

OPENING = (
    "topics beside Redis Streams and NATS JetStream: the same work on the same machine and disk, at equal durability, "
    "in one run that takes turns between the systems. Measured {date} on {machine}. Ratios travel between machines, "
    "times do not; every raw figure is in [results.json](benchmarks/results.json)."
)

RATIO = (
    "A ratio is ours / theirs in the same round, the median over all rounds, and so not always the quotient of the two "
    "medians beside it. For a rate more is better, for a latency less."
)

WORK_REQUESTS = {
    "single": (
        "One record a request, acknowledged before the same client sends the next. topics: one POST. "
        "Redis: one XADD. NATS: one PUB with its acknowledgement."
    ),
    "batch": (
        "100 records at once. topics: one POST of 100 records, `return_seqs=false`. Redis: 100 XADD in one pipeline. "
        "NATS: 100 PUB in a row, then 100 acknowledgements. Only the POST is one atomic request; its latency is that of "
        "all 100, as for the others."
    ),
    "read": (
        "The first 1000 records of the log. topics: one POST to `diff` with limit 1000. Redis: XRANGE - + COUNT 1000. "
        "NATS: a direct get of a batch of 1000 from the first sequence."
    ),
}

CELLS = "A cell is **records a second** above p50 / p99 / p99.9 of a request in milliseconds."

TAIL = (
    "From just before the write is sent until a reader that already waits has the record, in milliseconds: "
    "**p50 / p99 / p99.9**. topics: diff with a long poll. Redis: XREAD BLOCK. NATS: push consumer. Half load: writes "
    "at half the rate that the system can take, so that a faster system is measured under more writes."
)

PROCESSOR = (
    "Of all processes of the server, without the load generator. Where throughput is bound by cores, this is what "
    "decides it; for topics the front and the worker are two processes."
)

SCALING = (
    "One topics server with more workers, on {cores} cores that front, workers and load generator share: with fewer "
    "cores than processes the rate cannot grow, and the processor time of a record is the figure to look at."
)

BACKLOG = (
    "The same requests to a topic that already holds so many records. A cost that does not grow stays at 1 ×."
)

STAGES = (
    "One write through the server, and on to a waiting reader. A stage named with a slash is a part of the one before "
    "the slash. The budget is what the design expected."
)

GENERATOR = (
    "The same generator and the same bytes against a server that answers at once and keeps nothing. Headroom is that "
    "rate over the fastest rate measured with the same requests. The null server takes processor time too, so the "
    "generator alone is faster than this. Below 1.5 ×, or above 90 % of its core, it counts as near its limit."
)

READING = """\
- **Closed loop.** Each client sends, waits for the answer, and sends again. So throughput and mean latency are two views \
of one figure, and a stall of the server also stops its clients: the tail is milder than for clients that do not wait.
- **Equal durability.** `fsync`: the record is on the disk before the answer (Redis `appendfsync always`, NATS \
`sync_interval: always`). `disk`: it is handed to the operating system, and a crash of the machine may lose the \
last moments (Redis `appendfsync everysec`; NATS with its default interval, which is minutes, not a second).
- **Taking turns.** Every point is measured in {rounds} rounds, {seconds:g} s together, after a warm-up. In a round each \
system has its turn, so that noise hits all alike. Figures are medians over rounds; the thin bars in the plots reach from \
the worst round to the best.
- **What differs.** topics speaks HTTP and JSON, the peers protocols of their own; Redis keeps the log in memory and \
its file beside it, topics and NATS read from files. Each server runs on loopback with its data on the same disk, \
Redis without snapshots.
- **One generator** for all, in a process of its own on the same machine: what it costs is taken from every system alike."""

REPEAT = "`--help` lists the options for a shorter run or for a part of it; the page then says so."
