"""Jobs: they ask the server for a plan, hand its parts to an engine and tell the server what came of it."""
