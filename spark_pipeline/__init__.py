"""Spark integration: a data source, and jobs that merge, check and export the cold tier.

`tasks/` does the work in plain Python, `jobs/` distributes it with Spark or a process pool, `source/` is the Spark data
source, `cli/` is the `topics-spark` command.
"""
