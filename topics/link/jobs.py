"""What fronts and shards say to each other about streams of jobs: `/work` of a queue, `/stream` of a consumer.

    front → shard   WORK     a client wants jobs as they come; its number is that of the stream
                    WORKED   the client has room again after one push of that stream; send the next
                    UNWORK   the client is gone: what it has not settled goes to others at once
    shard → front   JOBS     a push: events as they are written to the client; with a status that is an error, the end

The answer to a WORK says whether there is such a queue or consumer. Pushes come after it, under the same number. A stream
has at most PUSHES_AHEAD of them that are not WORKED. What comes meanwhile stays with the shard, for anybody who has room.
"""

from __future__ import annotations

import msgspec

PUSHES_AHEAD = 2
PUSH_BYTES = 256 * 1024  # of records; one that is larger goes alone
MAX_MIN, MAX_MAX = 1, 1000  # leases that a connection holds at a time
WORK_MAX_DEFAULT = 1
STREAM_MAX_DEFAULT = 1000  # a consumer has a bound of its own, `max_ack_pending`


class Work(msgspec.Struct, frozen=True, array_like=True):
    """`consumer` is empty for a queue's own. `only_looks`: nothing is opened, the answer is all that is wanted."""

    consumer: str
    node: str
    max: int = WORK_MAX_DEFAULT
    lease_ms: int = 0  # 0: as the queue or the consumer has it
    only_looks: bool = False


encode = msgspec.msgpack.encode
decode_work = msgspec.msgpack.Decoder(Work).decode
