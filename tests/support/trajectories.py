"""Trajectories as the collector makes them, from turns of `tests.support.turns`."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from headrace_schemas import Branch, Dialogue, Span, Trajectory, Turn
from headrace_schemas.values.ids import derived_id
from tests.support.turns import START, ask, user


def branch(turn: Turn) -> Branch:
    """One turn's prompt and first answer."""
    choice = turn.choices[0]
    span = Span(start=len(turn.prompt_token_ids), logprobs=choice.logprobs, turn_id=turn.turn_id, version=turn.version)
    return Branch(token_ids=turn.prompt_token_ids + choice.token_ids, spans=(span,))


def closed(*turns: Turn, session: str = "s", at: float = 10.0, **fields: Any) -> Trajectory:
    """A trajectory that was closed `at` seconds after the start of time, a branch for each turn."""
    run_turns = turns or (ask([user("q")], session=session),)
    first = run_turns[0]
    given = {
        "time": START + timedelta(seconds=at),
        "trajectory_id": derived_id("trajectory", first.session_key, first.turn_id),
        "session_key": first.session_key,
        "session_id": first.session_id,
        "tenant": first.tenant,
        "model": first.model,
        "branches": tuple(branch(turn) for turn in run_turns),
        "dialogues": tuple(Dialogue(messages=(*turn.messages, turn.choices[0].message)) for turn in run_turns),
        "end_reason": "end_call",
        "started_at": first.started_at,
    }
    return Trajectory.model_validate({**given, **fields})
