"""Goal: topics are selected with the server's patterns; other kinds of patterns are refused with the right spelling.

Method: names and lists, without a server. Commands and data source are tested in test_consolidate.py and test_source_files.py.
"""

from __future__ import annotations

import pytest

from spark_pipeline.tasks.names import pick_names, split_names

NAMES = ["a..b", "bills", "orders", "orders.eu", "orders.eu.de", "orders.us"]


@pytest.mark.parametrize(
    ("wanted", "picked"),
    [
        ("orders", ["orders"]),
        ("orders.*", ["orders.eu", "orders.us"]),
        ("orders.>", ["orders.eu", "orders.eu.de", "orders.us"]),
        ("*", ["bills", "orders"]),
        ("*.eu.*", ["orders.eu.de"]),
        (">", NAMES),  # every topic, also one whose name is not tokens
        ("orders.us, orders.*,bills", ["orders.us", "orders.eu", "bills"]),
        ("orders,nobody,bills", "nobody"),
        ("bills.*", "bills.*"),
    ],
)
def test_names_and_patterns(wanted: str, picked: list[str] | str) -> None:
    assert pick_names(NAMES, split_names(wanted)) == picked


@pytest.mark.parametrize("wanted", ["ord*", "orders*", "orders.e?", "orders.[eu]s", "*orders", "orders.eu>"])
def test_patterns_of_file_names_are_refused(wanted: str) -> None:
    with pytest.raises(
        ValueError, match=r"a wildcard must be a whole token. Write 'orders\.\*' .* 'orders\.>'"
    ):
        split_names(f"bills,{wanted}")


@pytest.mark.parametrize(
    ("wanted", "told"), [("", "empty"), (" , ", "empty"), ("a..*", "empty"), ("a.>.b", "last")]
)
def test_names_that_can_match_nothing_are_refused(wanted: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        split_names(wanted)


def test_a_pattern_of_earlier_versions_that_now_matches_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'\*' matches no topic.*write '>' for orders\.eu\.de"):
        pick_names(["orders.eu.de"], ["*"])
    with pytest.raises(ValueError, match=r"write 'orders\.>'"):
        pick_names(["orders.eu.de"], ["orders.*"])
