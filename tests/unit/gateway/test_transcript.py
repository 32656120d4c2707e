"""Gathering what was sampled, and noticing when it cannot be true (P2, pitfalls 2 and 3)."""

from __future__ import annotations

from typing import Any

import pytest

from headrace_gateway.engine_wire import EngineAnswer
from headrace_gateway.transcript import Transcript
from tests.support.fake_replica import VERSION, Fault, Generation

BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "n": 2}


def streamed(body: dict[str, Any], fault: Fault | None = None) -> Transcript:
    transcript = Transcript()
    for chunk, _ in Generation(body, VERSION).chunks(fault or Fault()):
        transcript.add(EngineAnswer.model_validate(chunk), streamed=True)
    return transcript


def test_chunks_add_up_to_what_was_sampled() -> None:
    transcript = streamed(BODY)
    work = Generation(BODY, VERSION)
    assert transcript.prompt_token_ids == work.prompt_ids
    assert transcript.version == VERSION
    for index in (0, 1):
        choice = transcript.choices[index]
        assert choice.token_ids == work.tokens(index)
        assert "".join(choice.content) == "".join(f"w{token} " for token in work.tokens(index))
        assert choice.finish_reason == "stop"
    assert transcript.finished(2)
    assert transcript.disagreement() is None


def test_tool_calls_arrive_in_pieces() -> None:
    transcript = streamed({**BODY, "n": 1, "tools": [{"function": {"name": "search"}}]})
    (call,) = transcript.choices[0].calls.values()
    assert (call.name, call.arguments) == ("search", '{"query": "invoice"}')
    assert call.id.startswith("call_")


@pytest.mark.parametrize(
    ("fault", "complaint"),
    [
        (Fault(lose_logprobs=1), "choice 0 has 6 token ids and 5 logprobs"),
        (Fault(usage_off_by=1), "prompt and sampled ids are"),
        (Fault(no_usage=True), "the engine sent no usage"),
    ],
)
def test_what_does_not_add_up_is_named(fault: Fault, complaint: str) -> None:
    assert complaint in (streamed(BODY, fault).disagreement() or "")


def test_two_prompts_of_one_request_are_noticed() -> None:
    transcript = streamed(BODY)
    transcript.add(EngineAnswer(prompt_token_ids=[1, 2, 3]), streamed=True)
    assert "other prompt ids" in (transcript.disagreement() or "")


def test_a_stream_goes_on_from_its_tokens_and_from_nothing_without_any() -> None:
    transcript = Transcript()
    chunks = Generation(BODY, VERSION).chunks(Fault())
    for chunk, _ in chunks[:2]:  # the two openings
        transcript.add(EngineAnswer.model_validate(chunk), streamed=True)
    assert transcript.resume() is None
    for chunk, _ in chunks[2:5]:
        transcript.add(EngineAnswer.model_validate(chunk), streamed=True)
    resume = transcript.resume()
    assert resume
    assert [len(choice.token_ids) for choice in resume.choices] == [2, 1]


def test_a_stream_keeps_the_version_that_it_began_with() -> None:
    transcript = Transcript()
    for model in ("", VERSION, "tiny@ffffffffffff", ""):
        transcript.add(EngineAnswer(model=model), streamed=True)
    assert transcript.version == VERSION
