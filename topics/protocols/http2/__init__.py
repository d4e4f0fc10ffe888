"""HTTP/2 sessions on the h2 library."""
