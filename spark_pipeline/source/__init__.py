"""Topics as data frames: `spark.read.format("topics")`."""
