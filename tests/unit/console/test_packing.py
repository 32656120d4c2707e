"""Tests that packed ids and keys unpack to the same values, and that the history of outcomes is bounded."""

from __future__ import annotations

import pytest

from headrace_console.read_model import status
from headrace_console.read_model.packing import join_turn, pack_id, pack_key, split_turn, unpack_id, unpack_key
from headrace_console.read_model.rows import ExperienceRow, Names
from headrace_schemas.values.ids import response_id, session_key
from tests.support.account_events import verdict


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(response_id(session_key("default", "s")), id="a response"),
        "6f1d3c1e-9c0e-5d0a-8a55-6865616472ab",
        "a",
        "chatcmpl-abc",
        "x" * 15,
        "x" * 16,
        "x" * 26,
        "x" * 512,
        "6F1D3C1E-9C0E-5D0A-8A55-6865616472AB",
        "é\u202e",
    ],
)
def test_packed_ids_are_unpacked_unchanged(text: str) -> None:
    assert unpack_id(pack_id(text)) == text
    key, stored = split_turn(pack_id(text))
    assert (key is None) == (len(stored) != 16)
    assert join_turn(key or "", stored) == pack_id(text)


def test_packed_session_key_is_unpacked_unchanged_and_equals_no_other_text() -> None:
    key = session_key("default", "s")
    assert unpack_key(pack_key(key)) == key
    assert len(pack_key(key)) == 10
    assert len({pack_key(text) for text in (key, key.upper(), "", "a", key + "a")}) == 5


def test_history_of_outcomes_is_bounded_and_keeps_what_statuses_need() -> None:
    names, row = Names(), ExperienceRow(1, b"x", revision=999)
    for revision in range(1000):
        item = verdict("E", "a", revision=revision, dropped="superseded" if revision else None)
        status.add_outcome(row, (1, revision), item, names)
    assert len(row.history or "") < 20_000
    assert status.outcomes_of(row, 1, names).status("a", 999, None, refused=False) == ("trained", "")
