"""From a cursor to a page: row selection, frames from memory, disk or cold tier, rendering."""
