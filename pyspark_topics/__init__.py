"""Spark looks for data sources in modules named pyspark_*, and finds `topics` here: nobody has to register it."""

from spark_pipeline.source.topics_source import TopicsSource as DefaultSource

__all__ = ["DefaultSource"]
