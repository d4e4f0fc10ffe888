"""The `topics` command."""
