"""Consumers and queues: selection and leases, claims, settling, administration, dead letters."""
