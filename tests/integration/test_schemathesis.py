"""Goal: the server does what its own OpenAPI document says, also when asked oddly.

Method: schemathesis reads the document, makes requests from it, good and bad ones, and checks each
answer against it: no 5xx, no status, header or body that is not in the document, nothing malformed accepted.
"""

from __future__ import annotations

from typing import Any

import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.config import SchemathesisConfig
from schemathesis.specs.openapi import checks

import topics
from tests.support import length
from tests.support.server import Server
from topics.protocols.http.openapi.document import document

# What never ends cannot be checked as an answer: the tests of watching do that.
ENDLESS = [
    "/v0/watch/{wid}",
    "/v0/ws",
    "/v0/topics/{topic}/work",
    "/v0/topics/{topic}/consumers/{consumer}/stream",
]
# Without the systematic variations of each field: they are made while tests are collected, by every process, and a list of filters
# has so many that this took minutes. What they would ask is asked by the tests of the contract.
CONFIG = SchemathesisConfig.from_dict({"phases": {"coverage": {"enabled": False}}})
schema = schemathesis.openapi.from_dict(document(topics.__version__), config=CONFIG).exclude(path=ENDLESS)


# By design: what exceeds a limit is often clamped, what a query cannot mean counts as absent, and `5.0` is no integer.
STRICTNESS = [checks.negative_data_rejection, checks.positive_data_acceptance]


def test_the_document_is_valid_openapi() -> None:
    schemathesis.openapi.from_dict(document(topics.__version__)).validate()


def test_the_document_is_served(shared_server: Server) -> None:
    assert shared_server.get("/v0/openapi.json").json == document(topics.__version__)


@schema.parametrize()
@settings(
    max_examples=length.pick(short=2, long=200),
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_the_document_is_kept(case: Any, shared_server: Server) -> None:
    for fields in (case.body, case.query):
        if isinstance(fields, dict):
            fields.pop("wait_ms", None)  # a long poll waits for what nobody writes
    address = f"http://{shared_server.host}:{shared_server.port}"
    case.call_and_validate(base_url=address, timeout=120, excluded_checks=STRICTNESS)
    if case.operation.path == "/v0/routers/{router}":  # a pattern would copy the topics of other tests
        shared_server.delete(case.formatted_path)
