"""Contents and output files of reports."""
