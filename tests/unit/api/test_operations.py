"""The table of operations is complete, and what follows from it agrees with it."""

from __future__ import annotations

from topics.api.operations import OPERATIONS
from topics.link import wire
from topics.protocols.http import admission
from topics.protocols.http.openapi.document import PATH_NAMES, document


def test_names_and_routes_are_unique() -> None:
    assert len({one.name for one in OPERATIONS}) == len({one.route for one in OPERATIONS}) == len(OPERATIONS)


def test_every_operation_has_an_endpoint_and_a_place_in_the_document() -> None:
    assert set(admission._ENDPOINTS) == {one.name for one in OPERATIONS}
    assert set(admission._SERVED) <= set(admission._ENDPOINTS)
    paths = document("1")["paths"]
    for one in OPERATIONS:
        assert paths[one.path][one.method.lower()]["operationId"] == one.name
        assert set(one.names_in_path) <= set(PATH_NAMES)


def test_a_message_has_one_label_and_changes_something_or_not() -> None:
    for name in {name for one in OPERATIONS for name in one.commands}:
        users = [one for one in OPERATIONS if name in one.commands]
        assert len({(one.label, one.changes) for one in users}) == 1, name
        assert (getattr(wire, name) in wire.CHANGES) == users[0].changes


def test_an_operation_that_changes_something_needs_more_than_reading() -> None:
    assert {one.name for one in OPERATIONS if one.changes and not {*one.scopes} - {"read"}} == set()
