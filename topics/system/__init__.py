"""The environment of a process: settings, logging, output, read-only files."""
