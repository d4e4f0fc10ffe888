"""An order pipeline: a log of orders, a router, a queue with dead letters, workers.

    orders (log) ──router: tag paid──▶ shipping (queue) ──worker──▶ shipped (log)
                                              └─ given up, or failed 3 times ──▶ shipping.dead

    python orders.py setup | shop [COUNT] | ship [--drain] | dead | retry ADDRESS

The server is TOPICS_URL, or http://127.0.0.1:4000.
"""

from __future__ import annotations

import argparse
import threading
import time

from topics import Client
from topics.client import GiveUp
from topics.client.flows import Retries

DAY_MS = 86_400_000  # how long idempotency keys are remembered
TOWNS = ("Oslo", "Bergen", "", "Narvik")  # one order in four has no address


def setup(client: Client) -> None:
    """Create the topics and the router. Safe to repeat."""
    client.create_topic("orders", durability="fsync")
    client.create_topic("shipped", durability="fsync", idempotency_window_ms=DAY_MS)
    client.create_topic(
        "shipping",
        type="queue",
        durability="fsync",
        max_deliveries=3,
        dead_letter="shipping.dead",
        idempotency_window_ms=DAY_MS,
    )
    client.create_router("paid-orders", "orders", "shipping", filter="paid")


def shop(client: Client, count: int) -> None:
    """A shop that writes orders in batches, each exactly once even if responses are lost."""
    with client.producer("orders") as producer:
        for number in range(1, count + 1):
            order = {"order": number, "address": TOWNS[(number - 1) % len(TOWNS)]}
            producer.send(order, tag="paid" if number % 5 else "open")
    print(f"{count} orders written")


def ship(client: Client, *, drain: bool) -> None:
    """A worker. Run any number of them, on any machines; on Ctrl-C they finish their current jobs."""

    def handle(job) -> None:  # type: ignore[no-untyped-def]
        order = job.data
        if not order["address"]:
            raise GiveUp("no address")  # becomes a dead letter at once
        if order["order"] % 4 == 0 and job.deliveries == 1:
            raise ConnectionError("the carrier is unreachable")  # retried with backoff
        # A job may run twice, if a worker dies before its ack. The key deduplicates the writes, for a day.
        client.write("shipped", order, idempotency_key=f"order-{order['order']}")
        print(f"order {order['order']} to {order['address']}, delivery {job.deliveries}", flush=True)

    worker = client.worker(
        "shipping", handle, concurrency=2, poll_ms=500, backoff=Retries(first_s=0.2, most_s=60)
    )
    if drain:
        threading.Thread(target=stop_when_empty, args=(client, worker), daemon=True).start()
    print(worker.run())


def stop_when_empty(client: Client, worker) -> None:  # type: ignore[no-untyped-def]
    while client.get_topic("shipping").count:
        time.sleep(0.1)
    worker.stop()


def dead(client: Client) -> None:
    for letter in client.records("shipping.dead"):
        print(f"order {letter.data['order']}: {letter.meta.get('$dead_letter_reason', 'failed 3 times')}")


def retry(client: Client, address: str) -> None:
    """Put dead letters back into the queue, with an address. Can be interrupted and repeated within a day: the keys deduplicate."""
    for letter in client.records("shipping.dead"):
        client.write("shipping", {**letter.data, "address": address}, idempotency_key=f"retry-{letter.seq}")
        client.delete("shipping.dead", seqs=[letter.seq])
        print(f"order {letter.data['order']} is back in the queue")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("setup")
    commands.add_parser("shop").add_argument("count", type=int, nargs="?", default=12)
    commands.add_parser("ship").add_argument(
        "--drain", action="store_true", help="exit when the queue is empty"
    )
    commands.add_parser("dead")
    commands.add_parser("retry").add_argument("address")
    arguments = parser.parse_args()
    with Client() as client:
        if arguments.command == "setup":
            setup(client)
        elif arguments.command == "shop":
            shop(client, arguments.count)
        elif arguments.command == "ship":
            ship(client, drain=arguments.drain)
        elif arguments.command == "dead":
            dead(client)
        else:
            retry(client, arguments.address)


if __name__ == "__main__":
    main()
