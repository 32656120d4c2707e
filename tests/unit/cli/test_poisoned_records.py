"""Commands that read topics do not end because of one record, whatever a producer wrote into it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from headrace import topics
from headrace_operations.turn_account import TurnAccountBuilder
from tests.support.turns import ask, user


@pytest.mark.parametrize("timestamp", [2**62, -(2**62), -1, 0, None, 1e300])
@pytest.mark.parametrize("value", [b"", b"{", b"[" * 200_000, b"\xff", None, b'{"time": 1e308}'], ids=range(6))
async def test_an_entry_of_any_record(timestamp: Any, value: bytes | None) -> None:
    message: Any = SimpleNamespace(
        topic="turns", partition=0, offset=7, key=b"\xff\x00", value=value, headers=(), timestamp=timestamp
    )
    entry = await topics._entry(message)
    assert (entry.offset, entry.event) == (7, None)
    assert entry.problem


@pytest.mark.parametrize("error", [ValueError, OverflowError, RecursionError, KeyError, UnicodeError])
def test_an_event_that_breaks_the_account_is_a_problem_of_it(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    turns = [ask([user(f"q{number}")], session=f"s{number}", at=number) for number in range(3)]
    real = TurnAccountBuilder.add

    def add(self: TurnAccountBuilder, event: Any) -> None:
        if event.event_id == turns[1].event_id:
            raise error("poison \x1b[31m \ud83d")
        real(self, event)

    monkeypatch.setattr(TurnAccountBuilder, "add", add)
    builder = TurnAccountBuilder()
    for number, turn in enumerate(turns):
        builder.add_or_note(turn, f"turns[0]@{number}")
    account = builder.close()
    assert (account.captured, account.problems_total) == (2, 1)
    assert "turns[0]@1" in account.problems[0]
