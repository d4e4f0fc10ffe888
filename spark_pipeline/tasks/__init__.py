"""The work itself, in plain Python: nothing here knows whether Spark, a pool or a test runs it."""
