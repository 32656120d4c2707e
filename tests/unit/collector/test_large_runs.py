"""Long runs are read and closed in worker threads, so that the service stays responsive."""

from __future__ import annotations

from typing import Any

import pytest

from headrace_schemas import Trajectory, Turn
from headrace_schemas.values.ids import response_id, session_key
from tests.support.loop_block import blocked
from tests.support.turns import after, ask, end, user
from tests.unit.collector.conftest import Open, pass_time

_TURNS, _TOKENS = 24, 60_000
_BLOCK_S_MAX = 0.1


def _run() -> list[Turn]:
    """Turns of one conversation; each prompt holds the one before it, as an agent with long context sends them."""
    turns: list[Turn] = []
    prompt = tuple(range(1, _TOKENS))
    for at in range(_TURNS):
        messages = after(turns[-1], user(f"more {at}")) if turns else [user("q")]
        fields: dict[str, Any] = {"prompt_token_ids": prompt, "turn_id": response_id(session_key("default", "s"))}
        turns.append(ask(messages, "yes", at=float(at), **fields))
        prompt = (*prompt, *turns[-1].choices[0].token_ids, 5, 6)
    return turns


async def test_closing_a_long_run_does_not_block_the_event_loop(with_settings: Open) -> None:
    turns = _run()
    async with with_settings() as stream:
        for turn in turns:
            await stream.deliver(turn)
        async with blocked() as block:
            await stream.deliver(end())
            await pass_time(stream, 1.0)
        (trajectory,) = stream.sent(Trajectory)
    assert trajectory.turn_ids == tuple(turn.turn_id for turn in turns)
    assert block.busy_s < _BLOCK_S_MAX, f"{1000 * block.busy_s:.0f} ms"


@pytest.mark.parametrize("tokens", [10, 40_000])
async def test_runs_of_every_size_give_the_same_trajectory(with_settings: Open, tokens: int) -> None:
    """Short runs are read at once, long ones in a thread."""
    turn = ask([user("q")], "yes", prompt_token_ids=tuple(range(1, tokens)))
    async with with_settings() as stream:
        await stream.deliver(turn, end())
        (trajectory,) = stream.sent(Trajectory)
    assert trajectory.branches[0].token_ids == (*turn.prompt_token_ids, *turn.choices[0].token_ids)
