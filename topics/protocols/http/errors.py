"""Errors in HTTP: the status of each code, header lines, and the JSON body."""

from __future__ import annotations

import msgspec

STATUS = {
    "invalid_request": 400,
    "batch_too_large": 400,
    "record_too_large": 400,
    "unauthorized": 401,
    "forbidden": 403,
    "forbidden_origin": 403,
    "topic_not_found": 404,
    "consumer_not_found": 404,
    "router_not_found": 404,
    "plan_not_found": 404,
    "snapshot_not_found": 404,
    "txn_not_found": 404,
    "not_found": 404,
    "method_not_allowed": 405,
    "not_acceptable": 406,
    "request_timeout": 408,
    "topic_exists_incompatible": 409,
    "router_cycle": 409,
    "topic_not_empty": 409,
    "wrong_last_seq": 409,
    "wrong_epoch": 409,
    "not_a_queue": 409,
    "consumer_overlap": 409,
    "no_cold_tier": 409,
    "plan_leased": 409,
    "inputs_changed": 409,
    "lease_lost": 410,
    "txn_incomplete": 409,
    "txn_committed": 409,
    "payload_too_large": 413,
    "unsupported_media_type": 415,
    "misdirected_request": 421,
    "topic_full": 422,
    "output_invalid": 422,
    "throttled": 429,
    "header_fields_too_large": 431,
    "internal": 500,
    "not_ready": 503,
    "shutting_down": 503,
}

RETRY_AFTER = b"Retry-After: 1\r\n"


def error_body(code: str, message: str, detail: dict[str, object] | None = None) -> bytes:
    error: dict[str, object] = {"code": code, "message": message}
    if detail:
        error["detail"] = detail
    return msgspec.json.encode({"error": error})


def error_head(status: int) -> bytes:
    """Header lines of an error response: Retry-After for 429 and 503."""
    return RETRY_AFTER if status in (429, 503) else b""
