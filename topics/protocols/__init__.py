"""Client protocols: parsing and serialization without sockets or an event loop."""
