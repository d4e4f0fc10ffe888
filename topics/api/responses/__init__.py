"""JSON response bodies, as msgspec types: the server encodes them, the client decodes them, the OpenAPI document describes them."""
