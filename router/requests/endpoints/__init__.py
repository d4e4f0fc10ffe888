"""The endpoints: what each request means, and which shard answers it."""
