"""A single judgement returns scores, or raises an error with the reason."""

from __future__ import annotations

import pytest

from headrace_judge.endpoint import EndpointAway
from headrace_judge.once import NoVerdict, scores
from tests.support.fake_llm import FakeLLM, abstain, prose, status, verdict

CRITERIA = {"relevance": "Is it to the point?", "accuracy": "Is it right?"}


def ask(llm: FakeLLM) -> dict[str, float]:
    return scores({"base_url": llm.base_url, "model": "gpt-4"}, "", CRITERIA, "Who wrote?", "Ada wrote.")


def test_each_criterion_has_its_score() -> None:
    with FakeLLM(verdict(relevance=5, accuracy=2)) as llm:
        assert ask(llm) == {"relevance": 5.0, "accuracy": 2.0}
        assert "Ada wrote." in llm.calls[0].prompt
        assert "Is it right?" in llm.calls[0].prompt


def test_an_answer_that_cannot_be_read_is_asked_for_once_more() -> None:
    with FakeLLM(verdict(relevance=5, accuracy=2)) as llm:
        llm.then(prose())
        assert ask(llm)["accuracy"] == 2.0
        assert len(llm.calls) == 2
        llm.then(prose(), prose())
        with pytest.raises(NoVerdict, match="is no verdict"):
            ask(llm)


def test_no_verdict_is_no_score() -> None:
    with FakeLLM(abstain()) as llm:
        with pytest.raises(NoVerdict, match="abstained"):
            ask(llm)
        llm.then(status(500))
        with pytest.raises(EndpointAway):
            ask(llm)
        llm.then(verdict(relevance=6, accuracy=1), verdict(relevance=5))
        with pytest.raises(NoVerdict):
            ask(llm)


async def test_a_program_with_an_event_loop_may_ask() -> None:
    with FakeLLM(verdict(relevance=1, accuracy=1)) as llm:
        assert ask(llm) == {"relevance": 1.0, "accuracy": 1.0}
