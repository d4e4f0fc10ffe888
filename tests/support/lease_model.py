"""A reference model of a queue, as simple as possible: every job in a dict, and every rule a loop over all of them.

A job is in exactly one state: ready, leased, delayed or moving; or gone, and then done, dead or removed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from topics.api.config import TopicConfig

Place = Literal["ready", "leased", "delayed", "moving"]
End = Literal["done", "dead", "removed"]
Seen = tuple[int, list[int], tuple[int, int, int]]  # head, live seqs, ready and in flight and dead lettered


@dataclass
class Job:
    seq: int
    ts: int
    place: Place = "ready"
    handed_out: bool = (
        False  # since the queue was created or restarted: it comes before jobs that were never delivered
    )
    deliveries: int = 0
    node: bytes = b""
    lease_id: int = 0
    deadline: int = 0
    connection: int = 0
    due: int = 0
    doomed: bool = False  # its dead letter topic has refused it, and gets it anyway


@dataclass
class LeaseModel:
    config: TopicConfig
    jobs: dict[int, Job] = field(default_factory=dict)  # in the order of seqs
    ends: dict[int, End] = field(default_factory=dict)
    head: int = 0
    lease_ids: set[int] = field(default_factory=set)  # every lease id ever given

    # -- time and retention --------------------------------------------------------------------------------

    def pass_to(self, now: int) -> None:
        """Apply everything that is due by now."""
        ttl_ms = self.config.ttl_ms
        for job in list(self.jobs.values()):
            if ttl_ms and now - job.ts > ttl_ms:
                self.end(job.seq, "removed")
            elif (job.place == "leased" and now > job.deadline) or (
                job.place == "delayed" and now >= job.due
            ):
                job.place = "ready"

    def produce(self, count: int, now: int) -> None:
        for seq in range(self.head + 1, self.head + count + 1):
            self.jobs[seq] = Job(seq, now)
        self.head += count
        cap = self.config.cap_records
        while cap and len(self.jobs) > cap:
            self.end(next(iter(self.jobs)), "removed")

    def end(self, seq: int, how: End) -> None:
        del self.jobs[seq]
        assert seq not in self.ends, f"{seq} ended twice"
        self.ends[seq] = how

    def remove(self, seqs: Iterable[int]) -> None:
        for seq in seqs:
            if seq in self.jobs:
                self.end(seq, "removed")

    # -- leases --------------------------------------------------------------------------------------------

    def is_over(self, job: Job) -> bool:
        """It has had its last delivery, or was being moved to the dead letters already."""
        if not self.config.dead_letter:
            return False
        most = self.config.max_deliveries
        return job.doomed or (most > 0 and job.deliveries >= most)

    def next_in_line(self, max: int) -> tuple[list[Job], list[Job]]:
        """The jobs that a claim of `max` gets, and jobs before them that have had their last delivery."""
        ready = [job for job in self.jobs.values() if job.place == "ready"]
        line = [job for job in ready if job.handed_out] + [job for job in ready if not job.handed_out]
        chosen: list[Job] = []
        dying: list[Job] = []
        for job in line:
            if self.is_over(job):
                dying.append(job)
            elif len(chosen) == max:
                break
            else:
                chosen.append(job)
        return chosen, dying

    def lease(self, job: Job, *, node: bytes, lease_id: int, deadline: int, connection: int) -> None:
        assert job.place == "ready", f"{job} is delivered while it is {job.place}"
        assert lease_id not in self.lease_ids, f"lease id {lease_id} is given a second time"
        self.lease_ids.add(lease_id)
        job.place, job.handed_out, job.doomed = "leased", True, False
        job.deliveries += 1
        job.node, job.lease_id, job.deadline, job.connection = node, lease_id, deadline, connection

    def holds(self, seq: int, node: bytes, fence: int) -> bool:
        job = self.jobs.get(seq)
        return job is not None and job.place == "leased" and job.node == node and fence in (0, job.lease_id)

    def nack(self, seq: int, now: int, *, kind: str, delay_ms: int) -> None:
        job = self.jobs[seq]
        if kind == "dead":
            job.place = "moving"
            return
        if kind == "release":
            job.deliveries -= 1
        job.place, job.due = ("delayed", now + delay_ms) if delay_ms else ("ready", 0)

    def extend(self, seq: int, now: int, lease_ms: int) -> None:
        self.jobs[seq].deadline = now + lease_ms

    def release(self, connection: int) -> int:
        held = [job for job in self.jobs.values() if job.place == "leased" and job.connection == connection]
        for job in held:
            job.place = "ready"
        return len(held)

    # -- restarts ------------------------------------------------------------------------------------------

    def restart(self) -> None:
        """Logged leases are kept, except those of connections; otherwise all jobs are ready and count as never
        delivered. Moves continue.
        """
        for job in self.jobs.values():
            if self.config.leases_durable:
                if job.place == "leased" and job.connection:
                    job.place = "ready"
                job.connection = 0
            elif job.place != "moving":
                job.place, job.handed_out, job.deliveries, job.doomed = "ready", False, 0, False

    # -- visible state -------------------------------------------------------------------------------------

    def seen(self) -> Seen:
        return self.head, list(self.jobs), self.counts()

    def counts(self) -> tuple[int, int, int]:
        places = [job.place for job in self.jobs.values()]
        return places.count("ready"), places.count("leased"), list(self.ends.values()).count("dead")
