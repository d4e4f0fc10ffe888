"""HTTP/2, based on the h2 library."""
