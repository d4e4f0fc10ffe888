"""Entry point by which Spark finds the data source `topics`: it searches modules named pyspark_*."""

from spark_pipeline.source.topics_source import TopicsSource as DefaultSource

__all__ = ["DefaultSource"]
