"""Answers of the real engine that a grammar or truncation restricted, from the sampler to the trainer's logprobs.

At lag 0 the trainer's logprobs are the recorded ones, and its sets are the engine's masks, bit for bit.
"""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace_inference.chat.tokenizer import ChatTokenizer
from headrace_inference.engine import Tokens
from headrace_inference.grammar.forms import AnswerForm
from headrace_inference.settings import TorchSettings
from headrace_inference.torch_engine.engine import TorchEngine
from headrace_runtime.storage import versions
from headrace_runtime.storage.blobs import BlobStore
from headrace_schemas import TokenGrammar
from headrace_trainer.experiences.restrictions import SetBuilder, SetsUnknown
from tests.support import tiny_model
from tests.support.restricted import (
    VOCABULARY,
    Json,
    Replica,
    experience_of,
    in_parallel,
    mean_difference,
    play_forced_calls,
    play_json_answers,
    play_truncated_answers,
    row_of,
)
from tests.support.seeds import draw_seed
from tests.unit.inference.test_grammar_turns import SLOW_FACTORS


@pytest.fixture
async def replica(base: Path, tmp_path: Path) -> AsyncIterator[Replica]:
    blobs = BlobStore((tmp_path / "blobs").as_uri())
    manifest = versions.read_manifest(blobs, tiny_model.publish(blobs, base).manifest)
    engine = TorchEngine(TorchSettings.model_validate({"device": "cpu"}))
    await engine.load(base, manifest)
    replica = Replica(engine, ChatTokenizer(base, manifest), manifest, base)
    yield replica
    replica.grammars.close()
    await engine.stop()


COUNTS = [pytest.param(20, id="20"), pytest.param(200, id="200", marks=pytest.mark.long)]
CALLS = [pytest.param(20, id="20"), pytest.param(500, id="500", marks=pytest.mark.long)]
WAYS: tuple[Json, ...] = (
    {"top_k": 5}, {"top_p": 0.4}, {"top_p": 0.3, "top_k": 40, "temperature": 0.7}, {"min_p": 0.5},
    {"min_p": 0.4, "top_p": 0.5, "temperature": 1.25},
)  # fmt: skip


@pytest.mark.parametrize("count", COUNTS)
async def test_json_answers_are_trained_with_the_sets_that_the_engine_sampled_from(
    replica: Replica, count: int
) -> None:
    assert await play_json_answers(replica, count) < 1e-5


@pytest.mark.parametrize("count", CALLS)
async def test_forced_calls_are_trained_with_the_sets_that_the_engine_sampled_from(
    replica: Replica, count: int
) -> None:
    assert await play_forced_calls(replica, count) < 1e-5


@pytest.mark.parametrize("count", CALLS)
async def test_truncated_answers_are_trained_with_their_stored_sets(replica: Replica, count: int) -> None:
    assert await play_truncated_answers(replica, count, WAYS) < 1e-5


@pytest.mark.parametrize("count", CALLS)
async def test_answers_with_penalties_and_a_bias_are_trained_with_the_logits_that_the_engine_sampled_from(
    replica: Replica, base: Path, count: int
) -> None:
    draw = random.Random(draw_seed())

    def draw_way() -> Json:
        bias = {draw.randrange(VOCABULARY): draw.uniform(-3, 3) for _ in range(5)}
        ways: list[Json] = [
            {"presence_penalty": 1.5}, {"frequency_penalty": -0.4}, {"logit_bias": bias},
            {"presence_penalty": -1.0, "frequency_penalty": 0.7, "logit_bias": bias, "temperature": 0.7},
            {"frequency_penalty": 0.9, "top_k": 9}, {"logit_bias": bias, "top_p": 0.3, "temperature": 1.25},
        ]  # fmt: skip
        return draw.choice(ways)

    hows = [draw_way() for _ in range(count)]
    forms = [AnswerForm({"type": "string", "maxLength": 20}) if draw.random() < 0.3 else None for _ in hows]
    draws = [random.Random(draw.randrange(2**31)) for _ in hows]
    answers = await in_parallel(
        [
            replica.answer(each, form, max_tokens=40, **how | {"logit_bias": tuple(how.get("logit_bias", {}).items())})
            for each, form, how in zip(draws, forms, hows, strict=True)
        ]
    )
    builder, rows, unshifted = SetBuilder(base, VOCABULARY), [], []
    for how, (tokens, record, _, prompt) in zip(hows, answers, strict=True):
        event = experience_of(replica.turn(tokens, record, prompt, **how))
        assert event.branch is not None
        (span,) = event.branch.spans
        assert span.token_kind == ("stored" if span.stored_sets else "held" if record else "shifted")
        rows.append(row_of(event, builder, replica.manifest.version))
        plain = event.branch.model_copy(update={"spans": (span.model_copy(update={"logit_shift": None}),)})
        unshifted.append(replace(rows[-1], sets=builder.build(plain)))
    assert mean_difference(base, rows) < 1e-5
    assert mean_difference(base, unshifted) > 1e-2, "the shift is what makes them equal"


async def test_sets_and_biases_may_have_every_token_and_no_other(replica: Replica, base: Path) -> None:
    def problem(sets: list[int] | None, **how: Any) -> str | None:
        branch = experience_of(replica.turn(Tokens(0, [5], [-1.0], sets=sets), None, [40, 41], **how)).branch
        assert branch is not None
        return SetBuilder(base, VOCABULARY).problem(branch)

    assert problem([VOCABULARY, *range(VOCABULARY)], top_p=0.9) is None
    assert problem([2, 5, VOCABULARY], top_p=0.9) == "vocabulary"
    assert problem(None, logit_bias={VOCABULARY - 1: 1.0}) is None
    assert problem(None, logit_bias={VOCABULARY: 1.0}) == "vocabulary"


async def test_a_turn_with_larger_sets_than_an_event_takes_is_left_out(replica: Replica) -> None:
    draw = random.Random(draw_seed())
    tokens, record, _, prompt = await replica.answer(draw, top_p=0.999, max_tokens=150, stop_ids=frozenset())
    assert tokens.sets is None, "about 300 of 320 tokens at each of 150 positions are more than 32,768 numbers"
    assert len(tokens.token_ids) == len(tokens.logprobs)
    turn = replica.turn(tokens, record, prompt, top_p=0.999)
    assert not turn.recomputable


async def test_other_grammars_tokenizers_and_library_versions_are_refused_by_name(replica: Replica, base: Path) -> None:
    draw = random.Random(draw_seed())
    schema: Json = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    schema["additionalProperties"] = False
    tokens, record, _, prompt = await replica.answer(draw, AnswerForm(schema), max_tokens=20)
    assert record is not None
    other = TokenGrammar.model_validate({**record.model_dump(), "text": record.text.replace('"a"', '"b"')})

    def detail(grammar: TokenGrammar, changed: Sequence[int] = (), builder: SetBuilder | None = None) -> str:
        sampled = replace(tokens, token_ids=[*changed] or tokens.token_ids)
        branch = experience_of(replica.turn(sampled, grammar, prompt)).branch
        assert branch is not None
        return (builder or SetBuilder(base, VOCABULARY)).problem(branch) or "trained"

    assert detail(record) == "trained"
    assert detail(other) == "grammar"
    assert detail(record, [40, *tokens.token_ids[1:]]) == "grammar"
    assert detail(record.model_copy(update={"library_version": "0.0.1"})) == "grammar_library"
    assert detail(record.model_copy(update={"tokenizer_sha256": "0" * 64})) == "tokenizer"
    assert detail(record.model_copy(update={"vocabulary": 319})) == "vocabulary"
    assert detail(record, builder=SetBuilder(base.parent / "no-such-folder", VOCABULARY)) == "tokenizer"


async def test_a_grammar_that_never_ends_to_compile_is_refused(
    replica: Replica, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may come from any producer. The compilation is killed, and the next grammar is compiled."""
    tokens, record, _, prompt = await replica.answer(
        random.Random(draw_seed()), AnswerForm({"type": "boolean"}), max_tokens=20
    )
    assert record is not None
    text = f"start: %json {json.dumps({'allOf': SLOW_FACTORS})}"
    slow = experience_of(replica.turn(tokens, record.model_copy(update={"text": text}), prompt)).branch
    sound = experience_of(replica.turn(tokens, record, prompt)).branch
    assert slow is not None
    assert sound is not None
    builder = SetBuilder(base, VOCABULARY)
    assert builder.problem(sound) is None
    monkeypatch.setattr("headrace_trainer.experiences.restrictions._TRIAL_TIMEOUT_S", 0.5)
    assert builder.problem(slow) == "grammar"
    assert builder.problem(sound) is None


async def test_sets_of_a_branch_have_a_bound(replica: Replica, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, record, _, prompt = await replica.answer(
        random.Random(draw_seed()), AnswerForm({"type": "string", "minLength": 5, "maxLength": 9})
    )
    branch = experience_of(replica.turn(tokens, record, prompt)).branch
    assert branch is not None
    monkeypatch.setattr("headrace_trainer.experiences.restrictions.BRANCH_BYTES_MAX", 64)
    with pytest.raises(SetsUnknown, match="sets_size"):
        SetBuilder(base, VOCABULARY).build(branch)
