"""Where exports go: a folder of Parquet files for each topic, and what says which of them count."""
