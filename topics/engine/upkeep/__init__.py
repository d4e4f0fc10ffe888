"""Checkpoints, compaction, erasing, loading and recovery."""
