"""Tests of answers whose sampling was restricted, from the gateway's turn and the real engine to the rows of a step.

Each such experience is trained or dropped with a named detail. Tokens without a reported grammar are never in the loss.
At lag 0 the trainer's logprobs equal the recorded ones, and its token sets equal the engine's masks bit for bit.
"""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace_collector.closing import build_trajectory
from headrace_inference.chat.tokenizer import ChatTokenizer
from headrace_inference.engine import Tokens
from headrace_inference.grammar.forms import AnswerForm
from headrace_inference.settings import TorchSettings
from headrace_inference.torch_engine.engine import TorchEngine
from headrace_runtime.storage import versions
from headrace_runtime.storage.blobs import BlobStore
from headrace_schemas import Branch, Experience, Grammar, Sampling, Span, TokenGrammar, Turn
from headrace_schemas.http.answer_form import NamedFunction, NamedTool, ResponseFormat, grammar_of
from headrace_trainer.backends import BACKENDS
from headrace_trainer.batches.batch import Batch, Row
from headrace_trainer.experiences.admission import limits_of
from headrace_trainer.experiences.replies import ReplyReader
from headrace_trainer.experiences.restrictions import SetBuilder, TokenSetsError
from tests.support import tiny_model
from tests.support.presence import draw_seed
from tests.support.restricted import (
    VOCABULARY as ENGINE_VOCABULARY,
)
from tests.support.restricted import (
    Json,
    Replica,
    in_parallel,
    mean_difference,
    play_forced_calls,
    play_json_answers,
    play_truncated_answers,
    row_of,
)
from tests.support.restricted import (
    experience_of as engine_experience,
)
from tests.support.turns import START, after, ask, tool, user
from tests.unit.inference.test_lenient_schemas import SLOW_FACTORS
from tests.unit.trainer.conftest import Make
from tests.unit.trainer.world import VOCABULARY, World, experience

V = "m@000000000000"


def restricted(number: int, version: str, *, broken: bool = False, sets: int = 4, **fields: Any) -> Experience:
    """Return an experience whose answer has stored sets of `sets` tokens each. `broken` sets lack the sampled token."""
    plain = experience(number, version, **fields)
    assert plain.branch is not None
    (span,), token_ids = plain.branch.spans, plain.branch.token_ids
    draw = random.Random(number)
    stored: list[int] = []
    for token in token_ids[span.start : span.stop]:
        ids = {token, *draw.sample(range(VOCABULARY), sets - 1)} - ({token} if broken else set())
        stored += [len(ids), *sorted(ids)]
    logprobs = (-1.4,) * len(span.logprobs)  # about that of one token in four
    spans = (span.model_copy(update={"stored_sets": tuple(stored), "logprobs": logprobs}),)
    return plain.model_copy(update={"branch": Branch(token_ids=token_ids, spans=spans)})


async def test_restricted_experiences_are_trained_or_dropped_by_name(tmp_path: Path, make: Make) -> None:
    world, settings = World(tmp_path), make(batch_wait_s=1)
    await world.run(settings)
    version = world.bus.checkpoints[0].version
    world.bus.produce(
        restricted(1, version), restricted(2, version, reward=0.0), restricted(3, version, broken=True),
        experience(4, version, reward=0.5), restricted(5, version, reward=-1.0),
    )  # fmt: skip
    await world.run(settings, wait_s=2)
    reasons = {verdict.experience_id: verdict.detail or verdict.dropped for verdict in world.bus.verdicts}
    assert reasons == {"e1": None, "e2": None, "e3": "stored_sets", "e4": None, "e5": None}
    assert world.bus.checkpoints[-1].step > 0
    measured = [step for step in world.reporter.steps if "restricted_fraction" in step]
    assert measured
    assert 0 < measured[0]["restricted_fraction"] <= 1
    assert 0 < measured[0]["restricted_entropy"] < np.log(4) + 1e-6, "each set has four tokens"
    assert measured[0]["restricted_kl_behaviour"] > 0
    assert measured[0]["restricted_mismatch_mean"] > 0


def test_a_back_end_without_sets_drops_restricted_experiences(make: Make) -> None:
    assert not BACKENDS.get("trinity").restricts
    limits = limits_of(make(backend="trinity"), VOCABULARY, 2048)
    assert limits.restriction_problem(restricted(1, V)) == "restricted"
    assert limits.restriction_problem(experience(1, V)) is None
    assert limits_of(make(), VOCABULARY, 2048).restriction_problem(restricted(1, V)) is None


def test_a_row_is_never_built_without_its_sets(base: Path) -> None:
    event = restricted(1, V)
    assert event.branch is not None
    with pytest.raises(AssertionError, match="sets are missing"):
        Row.of(event, 1.0, V)
    row = Row.of(event, 1.0, V, sets=SetBuilder(base, VOCABULARY).build(event.branch))
    assert row.sets is not None
    assert (row.sets.positions_P == np.flatnonzero(row.loss_mask_T)).all()


def test_batches_with_other_sets_have_other_digests(base: Path) -> None:
    """The token sets are part of a batch's digest, and unrestricted batches keep their digests."""

    def digest(event: Experience) -> str:
        assert event.branch is not None
        return Batch((Row.of(event, 1.0, V, sets=SetBuilder(base, VOCABULARY).build(event.branch)),)).digest()

    events = [experience(1, V), restricted(1, V), restricted(1, V, sets=5)]
    assert len({digest(event) for event in events}) == 3
    assert digest(events[1]) == digest(Experience.from_json(events[1].to_json()))
    assert digest(events[0]) == Batch((Row.of(experience(1, V), 1.0, V),)).digest()


def test_large_equal_sets_are_one_array(base: Path) -> None:
    builder = SetBuilder(base, VOCABULARY)
    allowed = sorted({7, 9, *range(0, VOCABULARY, 2)})
    span = Span(
        start=2, logprobs=(-1.0, -2.0), turn_id="t", version=V, stored_sets=(len(allowed), *allowed) * 2
    )  # fmt: skip
    sets = builder.build(Branch(token_ids=(5, 6, 7, 9), spans=(span,)))
    assert sets is not None
    assert sets.sets[0] is sets.sets[1]
    assert sets.sets[0].dtype == np.uint8
    assert sets.sets[0].nbytes == VOCABULARY // 8


def test_replies_about_restricted_answers_are_not_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    event = restricted(1, V)
    reader = ReplyReader.__new__(ReplyReader)
    reader._bounds = (0.0, 1.0)
    monkeypatch.setattr(ReplyReader, "read_reply", lambda *_: None)
    rewarded = {"turn_rewards": [{"turn_id": event.turn_ids[0], "value": 1.0}]}
    free = Experience.model_validate({**experience(1, V).model_dump(), **rewarded})
    restricted_event = Experience.model_validate({**event.model_dump(), **rewarded})
    assert len(list(reader.examples(free))) == 1
    assert list(reader.examples(restricted_event)) == []


JSON = grammar_of(ResponseFormat(type="json_object"), None)
FORCED = grammar_of(None, NamedTool(type="function", function=NamedFunction(name="mark")))


def experience_of(*turns: Turn) -> Experience | None:
    """Return the experience of the run's only branch for policy gradients, or None if they do not train it."""
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
        bias = {draw.randrange(ENGINE_VOCABULARY): draw.uniform(-3, 3) for _ in range(5)}
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
    builder, rows, unshifted = SetBuilder(base, ENGINE_VOCABULARY), [], []
    for how, (tokens, record, _, prompt) in zip(hows, answers, strict=True):
        event = engine_experience(replica.turn(tokens, record, prompt, **how))
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
        branch = engine_experience(replica.turn(Tokens(0, [5], [-1.0], sets=sets), None, [40, 41], **how)).branch
        assert branch is not None
        return SetBuilder(base, ENGINE_VOCABULARY).problem(branch)

    assert problem([ENGINE_VOCABULARY, *range(ENGINE_VOCABULARY)], top_p=0.9) is None
    assert problem([2, 5, ENGINE_VOCABULARY], top_p=0.9) == "vocabulary"
    assert problem(None, logit_bias={ENGINE_VOCABULARY - 1: 1.0}) is None
    assert problem(None, logit_bias={ENGINE_VOCABULARY: 1.0}) == "vocabulary"


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
        branch = engine_experience(replica.turn(sampled, grammar, prompt)).branch
        assert branch is not None
        return (builder or SetBuilder(base, ENGINE_VOCABULARY)).problem(branch) or "trained"

    assert detail(record) == "trained"
    assert detail(other) == "grammar"
    assert detail(record, [40, *tokens.token_ids[1:]]) == "grammar"
    assert detail(record.model_copy(update={"library_version": "0.0.1"})) == "grammar_library"
    assert detail(record.model_copy(update={"tokenizer_sha256": "0" * 64})) == "tokenizer"
    assert detail(record.model_copy(update={"vocabulary": 319})) == "vocabulary"
    assert detail(record, builder=SetBuilder(base.parent / "no-such-folder", ENGINE_VOCABULARY)) == "tokenizer"


async def test_a_grammar_that_never_ends_to_compile_is_refused(
    replica: Replica, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A grammar may come from any producer. Its compilation is killed, and the next grammar is compiled."""
    tokens, record, _, prompt = await replica.answer(
        random.Random(draw_seed()), AnswerForm({"type": "boolean"}), max_tokens=20
    )
    assert record is not None
    text = f"start: %json {json.dumps({'allOf': SLOW_FACTORS})}"
    slow = engine_experience(replica.turn(tokens, record.model_copy(update={"text": text}), prompt)).branch
    sound = engine_experience(replica.turn(tokens, record, prompt)).branch
    assert slow is not None
    assert sound is not None
    builder = SetBuilder(base, ENGINE_VOCABULARY)
    assert builder.problem(sound) is None
    monkeypatch.setattr("headrace_trainer.experiences.restrictions._TRIAL_TIMEOUT_S", 0.5)
    assert builder.problem(slow) == "grammar"
    assert builder.problem(sound) is None


async def test_sets_of_a_branch_have_a_bound(replica: Replica, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, record, _, prompt = await replica.answer(
        random.Random(draw_seed()), AnswerForm({"type": "string", "minLength": 5, "maxLength": 9})
    )
    branch = engine_experience(replica.turn(tokens, record, prompt)).branch
    assert branch is not None
    monkeypatch.setattr("headrace_trainer.experiences.restrictions.BRANCH_BYTES_MAX", 64)
    with pytest.raises(TokenSetsError, match="sets_size"):
        SetBuilder(base, ENGINE_VOCABULARY).build(branch)
