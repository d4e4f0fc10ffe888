"""Offline tools on data files: inspect, verify, repair, change the number of shards."""
