"""The state of one topic in memory: rows, tags, idempotency keys, consumers, forwards, transactions."""
