"""Process environment: settings, logging, standard streams, read-only file access."""
