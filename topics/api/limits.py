"""Every bound of the engine, with its reason. What a full table answers stands beside it."""

from __future__ import annotations

KIB = 1024
MIB = 1024 * KIB

# Contract limits that the engine itself must never exceed, whatever the door.
TAG_BYTES_MAX = 1024  # u16 in the frame; HTTP stops at 256, NATS subjects need more
NODE_BYTES_MAX = 128
KEY_BYTES_MAX = 256
BATCH_RECORDS_MAX = 10_000
RECORD_BYTES_MAX = 1 * MIB
DIFF_LIMIT_MAX = 1000
DIFF_LIMIT_DEFAULT = 256
DIFF_BYTES_DEFAULT = 1 * MIB
DIFF_BYTES_MAX = 8 * MIB
DIFF_WAIT_MS_MAX = 30_000
FRAMES_LIMIT_MAX = 1_000_000  # records in a page of bare frames; the byte bound ends it long before
FILTER_ROWS_MAX = 131_072  # rows that one read with a tag match looks at: about 2 ms
FILTER_NAMES_MAX = 4096  # distinct tags that it compares, at about 0.5 us each
LIST_PAGE_MAX = 1000
TAGS_PAGE_MAX = 1000
SKIP_MAX = 1 << 32

# One commit group: what shares one envelope. More waits for the next envelope of the same turn.
GROUP_FRAMES_MAX = 65_536
GROUP_BYTES_MAX = 8 * MIB

# The log since the last checkpoint. A quarter of `log_bytes_max` begins one at once; from a half on it is pressure; past it
# records are refused with 429 until one has come to its end.
LOG_BYTES_MIN = 256 * MIB  # of `log_bytes_max`, which is else so many log files
RESERVE_BYTES = 2 * MIB  # that a shard holds for when the disk is full; of a small disk less
LOG_FILES = 4
LOG_CHECKPOINT_PARTS = 4
LOG_RETRY_MS = 1000  # when whoever was refused may come again

# Commands whose work grows with what a topic holds (long_commands.py), in units of about a microsecond.
LONG_TURN_UNITS = 2000  # of a turn: for all that wait, and as much again for those that come with it
LONG_SLICE_UNITS = 500  # of one of them, before the next one's turn
UPKEEP_RESUMED_MAX = 32  # that go on in one turn after they waited for a topic to be loaded
EXPIRE_RECORDS = 512  # that time or a cap has ended, and one step removes from a topic
LONG_COMMANDS_MAX = 64  # that wait; more are refused with 429

# Idempotency memory per topic. Past it the oldest key is forgotten before its window ends:
# at 100 keys a second a default window of two minutes holds 12 000.
DEDUPE_KEYS_MAX = 100_000
DEDUPE_FORGOTTEN_MAX = 64  # past their window, by one write: 100 000 at once would be a long turn

# Pages that long polls are woken with in one turn; the others are woken by the next one.
WAKE_BYTES_MAX = 32 * MIB
POLLS_ENDED_MAX = 32  # that one turn answers because their time is up

# Subject patterns. The results of matches are cached until there are this many, then the newest few stay.
SUBJECT_PATTERN_BYTES_MAX = 255  # as long as a topic name; bounds the depth of the trie, at 128 tokens
MATCHES_CACHED_MAX = 1024
MATCHES_CACHED_SWEPT = 256
SUBJECT_CHANGES_KEPT = 64  # that a cached result can catch up with: more would cost as much as a new walk

# Long polls parked on one topic; more are answered at once with an empty page.
WAITERS_PER_TOPIC_MAX = 10_000

# Consumers. Records in hand (leased, ready again, delayed, moving) of a queue; a claim beyond gets fewer or none.
PENDING_MAX = 262_144
CONSUMERS_PER_TOPIC_MAX = 1000  # more are refused with 429
CLAIM_MAX = 1000
CLAIM_BYTES_DEFAULT = 8 * MIB
DEAL_MAX = 10_000  # records that the claims of one window share
CLAIM_LOOK_MS = 60_000  # between two looks at what time makes ready
FILTER_PAIRS_MAX = 500_000  # of consumers of a work queue that are compared at a start; more are not
FIRSTS_MAX = 20_000  # tags of a consumer that begins with the last record of each; more are refused
UNMOVED_MS = 5_000  # until a letter that was refused is tried again

META_KEYS_MAX = 64

# Sink transactions. What is staged lies in files, whose bytes are bounded by the configuration.
TXN_OPEN_PER_TOPIC_MAX = 64  # more are refused with 429
TXN_OPEN_MAX = 256  # of a shard
TXN_CHUNKS_MAX = 200_000  # staged at a shard, at about 300 bytes of memory each
TXN_PARTS_MAX = 100_000  # that one commit names
TXN_PART_BYTES_MAX = 128
TXN_COMMITS_WAITING_MAX = 64  # of one transaction
TXN_PRODUCERS_MAX = 1000  # of a topic, whose last batches are kept; then 429 to a new one
TXN_PRODUCER_IDLE_MS = 7 * 86_400_000  # after which one may be forgotten for another
TXN_PRODUCERS_FORGOTTEN_MAX = 16  # at a time
TXN_TTL_MS_MIN, TXN_TTL_MS_MAX = 1000, 7 * 86_400_000
TXN_WHOLE_BYTES = GROUP_BYTES_MAX  # a transaction within these is one entry of the log
TXN_WHOLE_RECORDS = BATCH_RECORDS_MAX
TXN_SLICE_BYTES = 1 * MIB  # of a larger one appended at a time, but at least a chunk
TXN_SLICE_RECORDS = 4096
TXN_RETRY_MS = 1000  # until a commit that could not go on tries again

# Loss ranges per topic. Past it neighbouring ranges are joined: a too wide announcement is
# safe, a lost one is not.
LOSS_RANGES_MAX = 1024

# Control frames list seqs as ranges; a delete that touches more is split over several frames.
RANGES_PER_FRAME_MAX = 65_536

# Caps over all shards are handed out in pieces of at most this; smaller ones when the cap is small.
GRANT_TOPICS_MAX = 256
GRANT_BYTES_MAX = 64 * MIB

BACKGROUND_SYNC_MS = 100  # an unsynced byte waits no longer than this
TIME_CEILING_STEP_MS = 5_000  # how far time may run ahead of its synced ceiling
SEQ_CEILING_STEP_MIN = 1024  # about one second of light traffic
SEQ_CEILING_STEP_MAX = 1 << 20
SLEW_MS_PER_S = 50  # the engine clock follows the wall clock at this rate, one part in twenty

INLINE_ROWS = 64  # of a topic that rides in the snapshot and has no files
INLINE_TOTAL_BYTES = 64 * MIB  # of all such topics of a shard: each snapshot writes them again
SLICE_ROWS = 4096  # background work is cut into pieces of about 2 ms
SLICE_TOPICS = 8
SLICE_NAMES = 512
READ_GAP_BYTES = 4 * KIB  # neighbouring frames nearer than this are fetched by one read
RAM_BLOCK_BYTES = 64 * KIB  # records that are never logged are kept in blocks of this size

# Rewriting and moving at a pace. What was not used of it for so long may be used at once; more is not saved up.
PACE_BURST_MS = 250
PACE_SPAN_MS = 10_000  # over which it is looked how fast the log grows
MOVES_PER_GROWTH = 2  # segments move so many times as fast as the log grows, at least

# Giving space back.
TRIM_RECORDS = 128  # that a new cap per tag takes in one slice: about 2 ms, each in another place of the log
TRIM_TAGS = 65_536  # that are looked at for it
REFUSED_MAX = 4096  # damaged segments that are known not to be rewritten; the oldest is tried again

# The cold tier. A block is a MiB, so a read that waits holds 8 MiB at most.
COLD_BLOCKS_PER_READ = 8  # a page that would need more ends early
COLD_FETCH_BLOCKS = 4  # by one call; what follows the wanted ones is read ahead
COLD_FETCHES_MAX = 4  # at once, each on a thread of its own
COLD_READERS_MAX = 256  # reads that wait for fetches; more are refused
COLD_HELD_BYTES_MAX = (
    32 * MIB
)  # blocks beyond the cache for claims and copies that look at them in a later turn
COLD_RETRY_MS = 1000  # until something that nobody waits for is tried again
COLD_PAUSE_MS_MIN = 1000  # until moving is tried again, doubled with each failure
COLD_PAUSE_MS_MAX = 60_000

# Merges of cold segments. While one is swapped in, the rows of all its groups are in memory twice, 32 bytes each.
MERGE_BYTES_MAX = 2 << 30  # of an output's records: offsets in rows are u32, and half of them is room enough
MERGE_ROWS_MAX = 4 << 20  # of an output
PLAN_ROWS_MAX = 8 << 20  # of all outputs of a plan; what is left is the next plan's
PLAN_GROUPS_MAX = 64
PLAN_SEGMENTS_MAX = 4096  # inputs of a plan, each with a line in it
PLANS_MAX = 64  # of a shard; more are refused
RETIRED_MAX = 32_768  # replaced segments of a topic that still have files; with more no plan is made
COMMITTED_KEPT = 64  # plans of a topic that are remembered as committed
COMMITTED_RESULTS_KEPT = 4  # of them those whose result is remembered, too
SNAPSHOTS_MAX = 16  # pins of a topic; more are refused
SNAPSHOT_TTL_MS_MAX = 7 * 86_400_000
PLAN_LEASE_MS_MIN = 1000
PLAN_LEASE_MS_MAX = 3_600_000
MERGE_REQUESTS_MAX = 64  # calls about merges and pins that wait at a shard; more are refused
MERGE_WAIT_MS_MAX = 30_000
MANIFESTS_KEPT = 2  # of a topic, the newest; pinned ones stay as well
