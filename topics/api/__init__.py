"""The API: limits, configuration, errors, request and response types, API keys."""
