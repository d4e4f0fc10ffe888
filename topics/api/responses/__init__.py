"""The JSON bodies that the server sends, as types."""
