"""Offline tools for data files: inspect, verify, repair, reshard."""
