"""Commands to a shard and their results, with the columns of records that they carry."""
