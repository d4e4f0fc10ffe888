"""Benchmark of topics against Redis Streams and NATS JetStream: `scripts/bench peers` and `scripts/bench quick`."""
