"""Messages about job streams: `/work` of a queue and `/stream` of a consumer.

    front → shard   OPEN_JOBS    open a stream; the request id becomes its number
                    JOBS_ACK     the client has accepted one push; send the next
                    CLOSE_JOBS   the client has disconnected: release its leases at once
    shard → front   JOBS         a push: jobs, in the encoding that the OPEN_JOBS names; with the code ERROR, the end of the stream

The reply to OPEN_JOBS says whether the queue or consumer exists. Pushes follow it under the same number. A stream has at
most PUSHES_AHEAD pushes without a JOBS_ACK. Until it has room again, new jobs stay ready for other clients.
"""

from __future__ import annotations

import msgspec

PUSHES_AHEAD = 2
PUSH_BYTES = 256 * 1024  # of records; a larger record is pushed alone
MAX_MIN, MAX_MAX = 1, 1000  # leases per connection at a time
WORK_MAX_DEFAULT = 1
STREAM_MAX_DEFAULT = 1000  # a consumer has a limit of its own, `max_ack_pending`


class JobStreamOptions(msgspec.Struct, frozen=True, array_like=True):
    """`consumer` is empty for a queue. `check_only`: reply whether it exists, and open no stream."""

    consumer: str
    node: str
    max: int = WORK_MAX_DEFAULT
    lease_ms: int = 0  # 0: the default of the queue or consumer
    check_only: bool = False


encode = msgspec.msgpack.encode
decode_options = msgspec.msgpack.Decoder(JobStreamOptions).decode
