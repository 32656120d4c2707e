"""Held tokens whose grammar no replica reported are never in the loss, from a gateway's turn to the rows of a step."""

from __future__ import annotations

import numpy as np
import pytest

from headrace_collector.trajectories import build_trajectory
from headrace_schemas import Experience, Grammar, Sampling, Turn
from headrace_schemas.http.answer_form import NamedFunction, NamedTool, ResponseFormat, grammar_of
from headrace_trainer.batches.batch import Row
from tests.support.turns import START, after, ask, tool, user

JSON = grammar_of(ResponseFormat(type="json_object"), None)
FORCED = grammar_of(None, NamedTool(type="function", function=NamedFunction(name="mark")))


def experience_of(*turns: Turn) -> Experience | None:
    """Return the experience of the run's only branch as policy gradients train it, or None where they do not."""
    event = build_trajectory(
        turns, superseded=(), about_run=(), about_session=(), reason="end_call", models=1, turns_from=0, now=START
    )
    branch = event.branches[0].sampled
    if branch is None:
        return None
    return Experience(
        time=START, experience_id="e", trajectory_id=event.trajectory_id, session_key=event.session_key,
        session_id="s", model=event.model, branch=branch, turn_ids=branch.turn_ids, reward=1.0,
    )  # fmt: skip


@pytest.mark.parametrize("grammar", [JSON, FORCED])
def test_held_tokens_are_context_and_have_no_advantage(grammar: Grammar) -> None:
    first = ask([user("q")], "call", at=0)
    constrained = ask(after(first, tool("r")), '{"a": 1}', at=1, sampling=Sampling(grammar=grammar))
    last = ask(after(constrained, user("go on")), "done", at=2)
    experience = experience_of(first, constrained, last)
    assert experience is not None
    row = Row.of(experience, 1.0, None)
    begin = len(constrained.prompt_token_ids)
    answered = np.arange(begin, begin + len(constrained.choices[0].token_ids))
    assert tuple(row.token_ids_T[answered]) == constrained.choices[0].token_ids, "the model reads its own answer"
    assert not row.loss_mask_T[answered].any()
    assert not row.behaviour_T[answered].any(), "the logprobs of the grammar's distribution are nowhere"
    assert row.loss_mask_T.sum() == len(first.choices[0].token_ids) + len(last.choices[0].token_ids)


def test_a_run_of_held_answers_alone_is_not_trained() -> None:
    assert experience_of(ask([user("q")], "{}", sampling=Sampling(grammar=JSON))) is None
    assert experience_of(ask([user("q")], "{}", sampling=Sampling())) is not None
