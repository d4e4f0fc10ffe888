"""Goal: the server behaves as its OpenAPI document says, also for invalid requests.

Method: schemathesis generates valid and invalid requests from the document and checks each
answer against it: no 5xx, no undocumented status, header or body, nothing malformed accepted.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import topics
from tests.support import length
from tests.support.server import Server
from topics.protocols.http.openapi.document import document

if TYPE_CHECKING:
    from schemathesis import BaseSchema

# Streams have no end and cannot be checked as one answer: the tests of watching do that.
ENDLESS = {
    "/v0/watch/{wid}",
    "/v0/ws",
    "/v0/topics/{topic}/work",
    "/v0/topics/{topic}/consumers/{consumer}/stream",
}
OPERATIONS = [
    (method, path)
    for path, methods in document(topics.__version__)["paths"].items()
    if path not in ENDLESS
    for method in methods
    if method in {"get", "put", "post", "delete"}
]


@cache
def schema() -> BaseSchema:
    """schemathesis is imported only here, and its pytest plugin is off: only the process that runs these tests pays for it."""
    import schemathesis

    return schemathesis.openapi.from_dict(document(topics.__version__))


def test_the_document_is_valid_openapi() -> None:
    schema().validate()


def test_the_document_is_served(shared_server: Server) -> None:
    assert shared_server.get("/v0/openapi.json").json == document(topics.__version__)


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_the_document_is_kept(method: str, path: str, shared_server: Server) -> None:
    from schemathesis import GenerationMode
    from schemathesis.specs.openapi import checks

    # By design some violations are accepted: values beyond a limit are often clamped, invalid query values count as absent, and `5.0` is no integer.
    strictness = [checks.negative_data_rejection, checks.positive_data_acceptance]
    operation = schema()[path][method]
    modes = (
        list(GenerationMode)
        if operation.body or list(operation.iter_parameters())
        else [GenerationMode.POSITIVE]
    )

    @settings(
        max_examples=length.pick(short=2, long=200),
        deadline=None,
        derandomize=True,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=st.one_of(*(operation.as_strategy(mode) for mode in modes)))
    def ask(case: Any) -> None:
        for fields in (case.body, case.query):
            if isinstance(fields, dict):
                fields.pop("wait_ms", None)  # a long poll would wait for a record that is never written
        address = f"http://{shared_server.host}:{shared_server.port}"
        case.call_and_validate(base_url=address, timeout=120, excluded_checks=strictness)
        if path == "/v0/routers/{router}":  # a pattern would copy the topics of other tests
            shared_server.delete(case.formatted_path)

    ask()
