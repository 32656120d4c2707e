"""Which sessions a feedback reaches."""

from __future__ import annotations

from headrace_gateway.feedback import session_keys
from headrace_schemas import ids


def test_a_session_that_is_named_beside_turns_of_others_is_reached_first() -> None:
    own, other = ids.session_key("t", "own"), ids.session_key("t", "other")
    turn = ids.response_id(other)
    assert session_keys("t", "own", (turn,)) == [own, other]
    assert session_keys("t", "other", (turn, ids.response_id(own))) == [other, own]
    assert session_keys("t", None, (turn, turn)) == [other]
    assert session_keys("t", "own", ()) == [own]
