"""`topics inspect`: what a data file contains, and whether it is intact."""
