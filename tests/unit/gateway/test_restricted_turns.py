"""The gateway records the grammar and the stored sets that replicas report, also of streamed and resumed answers."""

from __future__ import annotations

from typing import Any

import pytest

from headrace_gateway.engine_wire import EngineAnswer
from headrace_gateway.transcript import Transcript
from headrace_schemas import Grammar, Sampling, TokenGrammar
from headrace_schemas.events.allowed_tokens import STORED_SETS_MAX
from tests.support.turns import ask, user

GRAMMAR = {
    "text": 'start: "a"', "library": "llguidance", "library_version": "1.9.1", "tokenizer_sha256": "a" * 64,
    "vocabulary": 320, "end_id": 2, "stop_ids": [2],
}  # fmt: skip


def answer(tokens: list[int] | None = None, *, prompt: list[int] | None = None, **fields: Any) -> EngineAnswer:
    choice: dict[str, Any] = {"index": 0, "delta": {}}
    if tokens:
        choice["token_ids"] = tokens
        choice["logprobs"] = {"content": [{"logprob": -1.0} for _ in tokens]}
        choice["headrace_stored_sets"] = fields.pop("sets", None)
    body = {"model": "m@0123456789ab", "choices": [choice], "prompt_token_ids": prompt, **fields}
    return EngineAnswer.model_validate(body)


def transcript_of(*answers: EngineAnswer) -> Transcript:
    transcript = Transcript()
    for each in answers:
        transcript.add(each, streamed=True)
    return transcript


def test_clients_do_not_get_the_fields() -> None:
    sent = answer([1], prompt=[9], sets=[1, 1], headrace_grammar=GRAMMAR)
    assert "headrace" not in sent.model_dump_json()


def test_sets_of_chunks_are_joined() -> None:
    transcript = transcript_of(answer(prompt=[9]), answer([4], sets=[2, 4, 5]), answer([6, 7], sets=[1, 6, 1, 7]))
    assert transcript.recorded_sets == {0: [2, 4, 5, 1, 6, 1, 7]}


@pytest.mark.parametrize("sets", [None, [STORED_SETS_MAX, *range(STORED_SETS_MAX)]])
def test_sets_that_are_missing_or_too_large_are_not_recorded(sets: list[int] | None) -> None:
    transcript = transcript_of(answer(prompt=[9]), answer([4], sets=[1, 4]), answer([6], sets=sets))
    assert transcript.recorded_sets == {}


def test_a_grammar_is_recorded_if_all_replicas_of_a_call_report_it() -> None:
    begun = (answer(prompt=[9], headrace_grammar=GRAMMAR), answer([4]))
    assert transcript_of(*begun).token_grammar == GRAMMAR
    resumed = answer(prompt=[9], headrace_grammar=GRAMMAR)
    assert transcript_of(*begun, resumed).token_grammar == GRAMMAR
    other = answer(prompt=[9], headrace_grammar={**GRAMMAR, "library_version": "1.7.6"})
    assert transcript_of(*begun, other).token_grammar is None
    assert transcript_of(*begun, answer(prompt=[9])).token_grammar is None
    failed = transcript_of(answer(prompt=[9], headrace_grammar=GRAMMAR))
    failed.forget()
    assert failed.token_grammar is None


@pytest.mark.parametrize(
    ("sampling", "fields", "recomputable"),
    [
        (Sampling(), {}, True),
        (Sampling(grammar=Grammar(tool_choice="required")), {}, False),
        (Sampling(grammar=Grammar(tool_choice="required")), {"token_grammar": TokenGrammar(**GRAMMAR)}, True),
        (Sampling(top_p=0.5), {}, False),
        (Sampling(top_p=0.5), {"sets": True}, True),
        (Sampling(top_k=4, grammar=Grammar(tool_choice="required")), {"token_grammar": TokenGrammar(**GRAMMAR)}, False),
        (Sampling(top_k=4, grammar=Grammar(tool_choice="required")), {"sets": True}, True),
        (Sampling(min_p=0.1), {}, False),
        (Sampling(min_p=0.1), {"sets": True}, True),
        (Sampling(top_p=0.5, temperature=0.0), {"sets": True}, False),
        (Sampling(top_p=0.5, presence_penalty=0.5), {"sets": True}, True),
    ],
)
def test_turns_are_trained_if_their_distribution_can_be_computed(
    sampling: Sampling, fields: dict[str, Any], recomputable: bool
) -> None:
    turn = ask([user("q")], "ab", "c", sampling=sampling)
    if fields.pop("sets", False):
        stored = [
            choice.model_copy(update={"stored_sets": tuple(n for token in choice.token_ids for n in (1, token))})
            for choice in turn.choices
        ]
        fields["choices"] = tuple(stored)
    assert turn.model_copy(update=fields).recomputable is recomputable
