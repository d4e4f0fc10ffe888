"""The `topics-spark` command."""
