"""HTTP/2 sessions without sockets, based on the h2 library."""
