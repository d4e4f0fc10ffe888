"""Reads: row selection, frames from memory, hot and cold segments, tombstones, JSON rendering."""
