"""Open streams of this front, and fan-out of new records to them."""
