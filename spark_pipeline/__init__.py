"""The data pipeline on Spark: a data source, and jobs that merge, check and export what the server has put away.

`tasks/` does the work in plain Python, `jobs/` hands it to Spark or to a pool of processes, `source/` shows topics as
data frames, `cli/` is the `topics-spark` command.
"""
