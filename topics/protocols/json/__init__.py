"""JSON: request bodies to engine commands, and results to response bodies."""
