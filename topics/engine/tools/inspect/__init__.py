"""`topics inspect`: show the contents of a data file and whether it is intact."""
