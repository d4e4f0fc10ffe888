"""A durable event log, job queue and pub/sub server."""

# The only place that says it: the package's metadata is made from this line.
__version__ = "0.1.0.dev0"
