"""Consumers and queues: record selection and leases, claims, settling, administration, dead letters."""
