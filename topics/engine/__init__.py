"""The deterministic core of one shard: decisions and file formats. Disk and clock are passed in."""
