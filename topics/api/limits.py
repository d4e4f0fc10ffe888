"""Limits of the engine. docs/limits.md says what happens beyond each."""

from __future__ import annotations

KIB = 1024
MIB = 1024 * KIB

# Limits of the HTTP API that the engine enforces itself, whichever protocol a request came through.
TAG_BYTES_MAX = 1024  # a frame could hold 65,535; the HTTP API allows 256
NODE_BYTES_MAX = 128
KEY_BYTES_MAX = 256
BATCH_RECORDS_MAX = 10_000
RECORD_BYTES_MAX = 1 * MIB
DIFF_LIMIT_MAX = 1000
DIFF_LIMIT_DEFAULT = 256
DIFF_BYTES_DEFAULT = 1 * MIB
DIFF_BYTES_MAX = 8 * MIB
DIFF_WAIT_MS_MAX = 30_000
FRAMES_LIMIT_MAX = 1_000_000  # records in a page of raw frames; the byte limit is reached long before
FILTER_ROWS_MAX = 131_072  # rows scanned by one read with a tag filter: about 2 ms
FILTER_NAMES_MAX = 4096  # distinct tags compared by such a read, at about 0.5 us each
LIST_PAGE_MAX = 1000
TAGS_PAGE_MAX = 1000
SKIP_MAX = 1 << 32

# One commit group: the frames that share one envelope. The rest goes into the next envelope of the same turn.
GROUP_FRAMES_MAX = 65_536
GROUP_BYTES_MAX = 8 * MIB

# The log since the last checkpoint. At a quarter of `log_bytes_max` a checkpoint starts at once; from a half on it counts as
# pressure; beyond it writes are refused with 429 until a checkpoint has finished.
LOG_BYTES_MIN = 256 * MIB  # of `log_bytes_max`; otherwise it is LOG_FILES log files
RESERVE_BYTES = 2 * MIB  # disk space that a shard reserves for when the disk is full; less on a small disk
LOG_FILES = 4
LOG_CHECKPOINT_PARTS = 4
LOG_RETRY_MS = 1000  # retry_after_ms of a refused write

# Commands whose cost grows with the size of the topic (long_commands.py), in units of about a microsecond.
LONG_TURN_UNITS = 2000  # per turn: for the waiting commands, and the same again for new ones
LONG_SLICE_UNITS = 500  # per command, before it is the next one's turn
UPKEEP_RESUMED_MAX = 32  # commands resumed per turn after waiting for a topic to be loaded
EXPIRE_RECORDS = 512  # records removed per step because of a TTL or cap
LONG_COMMANDS_MAX = 64  # waiting commands; more are refused with 429

# Idempotency keys remembered per topic. Beyond it the oldest key is forgotten before its window ends:
# at 100 keys a second a default window of two minutes holds 12 000.
DEDUPE_KEYS_MAX = 100_000
DEDUPE_FORGOTTEN_MAX = 64  # expired keys removed per write: 100 000 at once would be a long turn

# Bytes of pages sent to long polls in one turn; the others are answered in the next.
WAKE_BYTES_MAX = 32 * MIB
POLLS_ENDED_MAX = 32  # long polls that time out per turn

# Subject patterns. At most this many match results are cached, then only the newest stay.
SUBJECT_PATTERN_BYTES_MAX = 255  # as long as a topic name; limits the depth of the trie to 128 tokens
MATCHES_CACHED_MAX = 1024
MATCHES_CACHED_SWEPT = 256
SUBJECT_CHANGES_KEPT = 64  # changes applied to a cached result: more would cost as much as a new walk

# Long polls parked on one topic; more are answered at once with an empty page.
WAITERS_PER_TOPIC_MAX = 10_000

# Consumers. Pending records (leased, ready again, delayed, moving) of a queue; a claim beyond it gets fewer or none.
PENDING_MAX = 262_144
CONSUMERS_PER_TOPIC_MAX = 1000  # more are refused with 429
CLAIM_MAX = 1000
CLAIM_BYTES_DEFAULT = 8 * MIB
CLAIM_WINDOW_RECORDS_MAX = 10_000  # records distributed among the claims of one jitter window
CLAIM_CHECK_MS = 60_000  # maximum interval between checks for jobs that have become ready
FILTER_PAIRS_MAX = 500_000  # consumer pairs of a work queue checked for overlap at start; no check beyond it
INITIAL_SEQS_MAX = 20_000  # tags of a consumer with deliver last_per_tag; more are refused
DEAD_LETTER_RETRY_MS = 5_000  # retry delay of a refused dead letter

META_KEYS_MAX = 64

# Sink transactions. Staged records are in files, whose size is limited by the configuration.
TXN_OPEN_PER_TOPIC_MAX = 64  # more are refused with 429
TXN_OPEN_MAX = 256  # per shard
TXN_CHUNKS_MAX = 200_000  # staged per shard, at about 300 bytes of memory each
TXN_PARTS_MAX = 100_000  # per commit
TXN_PART_BYTES_MAX = 128
TXN_COMMITS_WAITING_MAX = 64  # per transaction
TXN_PRODUCERS_MAX = 1000  # remembered per topic with their last batch; a new one then gets 429
TXN_PRODUCER_IDLE_MS = 7 * 86_400_000  # idle time after which a producer may be replaced by another
TXN_PRODUCERS_FORGOTTEN_MAX = 16  # at a time
TXN_TTL_MS_MIN, TXN_TTL_MS_MAX = 1000, 7 * 86_400_000
TXN_WHOLE_BYTES = GROUP_BYTES_MAX  # a transaction up to this size is one log entry
TXN_WHOLE_RECORDS = BATCH_RECORDS_MAX
TXN_SLICE_BYTES = 1 * MIB  # of a larger one appended at a time, but at least a chunk
TXN_SLICE_RECORDS = 4096
TXN_RETRY_MS = 1000  # retry delay of a blocked commit

# Loss ranges per topic. Beyond it neighbouring ranges are joined: announcing too much is safe, losing a range is not.
LOSS_RANGES_MAX = 1024

# Control frames list seqs as ranges; a delete with more ranges is split into several frames.
RANGES_PER_FRAME_MAX = 65_536

# Server-wide caps are granted to shards in pieces of at most this size; smaller ones when the cap is small.
GRANT_TOPICS_MAX = 256
GRANT_BYTES_MAX = 64 * MIB

BACKGROUND_SYNC_MS = 100  # maximum time that written bytes stay unsynced
TIME_CEILING_STEP_MS = 5_000  # how far time may run ahead of its synced ceiling
SEQ_CEILING_STEP_MIN = 1024  # about one second of light traffic
SEQ_CEILING_STEP_MAX = 1 << 20
SLEW_MS_PER_S = 50  # rate at which the engine clock follows the wall clock, 5 %

INLINE_ROWS = 64  # rows of a topic that is stored inline in the snapshot, without files
INLINE_TOTAL_BYTES = 64 * MIB  # of all inline topics of a shard: each snapshot rewrites them
SLICE_ROWS = 4096  # background work is done in slices of about 2 ms
SLICE_TOPICS = 8
SLICE_NAMES = 512
READ_GAP_BYTES = 4 * KIB  # frames closer together than this are fetched by one read
RAM_BLOCK_BYTES = 64 * KIB  # block size of records that are never logged

# Rate limits of compaction and relocation. Unused rate of this long may be used at once.
PACE_BURST_MS = 250
PACE_SPAN_MS = 10_000  # interval over which the growth of the log is measured
MOVES_PER_GROWTH = 2  # relocation is at least this many times as fast as the log grows

# Reclaiming space.
TRIM_RECORDS = 128  # records removed per slice by a new cap per tag: about 2 ms, each elsewhere in the log
TRIM_TAGS = 65_536  # tags checked for it
DAMAGED_SEGMENTS_MAX = 4096  # known to be impossible to compact; beyond it the oldest is retried

# The cold tier. A block is 1 MiB, so a waiting read holds at most 8 MiB.
COLD_BLOCKS_PER_READ = 8  # a page that would need more ends early
COLD_FETCH_BLOCKS = 4  # per call, read-ahead included
COLD_FETCHES_MAX = 4  # concurrent fetches, each on its own thread
COLD_READERS_MAX = 256  # reads that wait for fetches; more are refused
COLD_HELD_BYTES_MAX = 32 * MIB  # blocks beyond the cache, for claims and copies that use them in a later turn
COLD_RETRY_MS = 1000  # retry delay of background fetches
COLD_PAUSE_MS_MIN = 1000  # retry delay of relocation, doubled with each failure
COLD_PAUSE_MS_MAX = 60_000

# Merges of cold segments. While a merge is applied, the rows of all its groups are in memory twice, 32 bytes each.
MERGE_BYTES_MAX = 2 << 30  # record bytes of an output: offsets in rows are u32, and half of that is enough
MERGE_ROWS_MAX = 4 << 20  # per output
PLAN_ROWS_MAX = 8 << 20  # of all outputs of a plan; the rest is left to the next plan
PLAN_GROUPS_MAX = 64
PLAN_SEGMENTS_MAX = 4096  # inputs of a plan, each with a line in it
PLANS_MAX = 64  # per shard; more are refused
RETIRED_MAX = 32_768  # replaced segments of a topic that still have files; no plan is made beyond it
COMMITTED_KEPT = 64  # plans per topic remembered as committed
COMMITTED_RESULTS_KEPT = 4  # of these, the ones whose result is remembered too
SNAPSHOTS_MAX = 16  # pins per topic; more are refused
SNAPSHOT_TTL_MS_MAX = 7 * 86_400_000
PLAN_LEASE_MS_MIN = 1000
PLAN_LEASE_MS_MAX = 3_600_000
MERGE_REQUESTS_MAX = 64  # merge and snapshot calls waiting at a shard; more are refused
MERGE_WAIT_MS_MAX = 30_000
MANIFESTS_KEPT = 2  # newest manifests kept per topic, in addition to pinned ones
