"""What a shard has of forwards, beside what the catalog says that it should have; and how many copies have come."""

from __future__ import annotations

import msgspec
import xxhash

from topics.engine.commands.forwards import Forward
from topics.engine.shard.shard import Shard
from workers.forward.messages import ForwardsCheck, ForwardsMissed


def digest_of(forward: Forward) -> int:
    """Of what a rule says; its state does not matter."""
    said = msgspec.structs.replace(forward, state="active", made_source=False, made_dest=False)
    return xxhash.xxh3_64_intdigest(msgspec.msgpack.encode(said))


def check_parts(shard: Shard, check: ForwardsCheck) -> ForwardsMissed:
    missed = ForwardsMissed()
    if shard.state.read_only is not None:
        # It may not have read its log to the end, and nothing can be put right here before it starts anew. Then it is asked
        # again.
        return missed
    for topic, uid in check.inflows:
        log = shard.state.published.get(topic)
        if log is None or log.inflows is None or uid not in log.inflows:
            missed.inflows.append(uid)
    for uid, digest in check.outflows:
        outflow = shard.forwards.outflows.get(uid)
        if outflow is None:
            missed.outflows.append(uid)
        elif digest_of(outflow.forward) != digest:
            missed.stale_outflows.append(uid)
    inflows = {uid for _, uid in check.inflows}
    for log in shard.state.published.values():
        if log.inflows is not None:
            missed.stray_inflows += [(log.name, uid) for uid in log.inflows if uid not in inflows]
    outflows = {uid for uid, _ in check.outflows}
    missed.stray_outflows = [uid for uid in shard.forwards.outflows if uid not in outflows]
    return missed
