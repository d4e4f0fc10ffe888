"""JSON response bodies, as msgspec types; the OpenAPI document is generated from them."""
