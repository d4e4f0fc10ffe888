"""The supervisor, and the child processes that it starts."""
