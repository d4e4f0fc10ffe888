"""In-memory state of one topic: rows, tags, idempotency keys, consumers, forwards, transactions and merges."""
