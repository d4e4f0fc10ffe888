"""What clients and processes agree on: limits, configuration, errors, request and response types, API keys."""
