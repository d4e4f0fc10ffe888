"""Tasks in plain Python, independent of whether Spark, a process pool or a test runs them."""
