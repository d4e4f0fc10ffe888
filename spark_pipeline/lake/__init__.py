"""Destinations of exports: a directory of Parquet files per topic, and the manifest or log that lists the valid ones."""
