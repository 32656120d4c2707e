"""Answers of the real engine that a grammar or truncation restricted, from the sampler to the trainer's logprobs.

At lag 0 the trainer's logprobs are the recorded ones, and its sets are the engine's masks, bit for bit.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from numpy.typing import NDArray

from headrace_collector.trajectories import build_trajectory
from headrace_inference.chat.parsers import Parsers
from headrace_inference.chat.tokenizer import ChatTokenizer
from headrace_inference.chat.tool_calls import HERMES
from headrace_inference.engine import Guide, Sampling, Start, Tokens
from headrace_inference.grammar.compiler import GrammarCompiler
from headrace_inference.grammar.forms import AnswerForm
from headrace_inference.grammar.settings import GrammarSettings
from headrace_inference.settings import TorchSettings
from headrace_inference.torch_engine.engine import TorchEngine
from headrace_runtime.storage import versions
from headrace_runtime.storage.blobs import BlobStore
from headrace_schemas import Experience, Grammar, TokenGrammar, Tool, Turn, Usage
from headrace_schemas import Sampling as RecordedSampling
from headrace_schemas.values.blobs import Manifest
from headrace_trainer.batches.batch import Row
from headrace_trainer.experiences.restrictions import SetBuilder, SetsUnknown
from tests.support import tiny_model
from tests.support.seeds import draw_seed
from tests.support.streams import START
from tests.support.turns import ask, user
from tests.unit.inference.test_grammar_turns import SLOW_FACTORS
from tests.unit.trainer.test_forward import open_policy
from tests.unit.trainer.world import VOCABULARY

Json = dict[str, Any]
TOKENS_MAX = 160
PARALLEL = 16


def schema_of(draw: random.Random, depth: int = 2) -> Json:
    """Return a random small schema: a mix of the parts of typical tools and typed answers."""
    kinds = ["enum", "integer", "boolean", "string", "null", "const"] + ["object", "array", "choice"] * (depth > 0)
    kind = draw.choice(kinds)
    if kind == "enum":
        return {"enum": draw.sample(["red", "green", "blue", 1, 2.5, None, True], 3)}
    if kind == "integer":
        return {"type": "integer", "minimum": draw.randrange(5), "maximum": draw.randrange(5, 5000)}
    if kind == "string":
        return {"type": "string", **draw.choice([{"maxLength": draw.randrange(1, 9)}, {"pattern": "^[a-f]{1,4}$"}])}
    if kind == "const":
        return {"const": draw.choice(["x", 7, [1, "two"], {"a": None}])}
    if kind == "object":
        names = draw.sample(["name", "n", "größe", "topic", "last one"], draw.randrange(1, 4))
        properties = {name: schema_of(draw, depth - 1) for name in names}
        required = draw.sample(names, draw.randrange(len(names) + 1))
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    if kind == "array":
        return {"type": "array", "items": schema_of(draw, depth - 1), "minItems": draw.randrange(2), "maxItems": 3}
    if kind == "choice":
        return {"anyOf": [schema_of(draw, depth - 1), schema_of(draw, depth - 1)]}
    return {"type": kind}


@dataclass
class RecordingGuide:
    """A guide that stores a copy of each mask that the sampler requested."""

    guide: Guide
    masks: list[NDArray[np.int32]] = field(default_factory=list)

    @property
    def error(self) -> str:
        return self.guide.error

    def allowed(self) -> NDArray[np.int32]:
        mask = self.guide.allowed()
        self.masks.append(mask.copy())
        return mask

    def accept(self, token: int) -> None:
        self.guide.accept(token)


@dataclass
class Replica:
    """A version in the engine and the compiler of its grammars."""

    engine: TorchEngine
    tokenizer: ChatTokenizer
    manifest: Manifest
    grammars: GrammarCompiler

    async def answer(
        self, draw: random.Random, form: AnswerForm | None = None, **how: Any
    ) -> tuple[Tokens, TokenGrammar | None, list[NDArray[np.int32]], list[int]]:
        """Return a sampled answer, its grammar with the sampler's masks, and the prompt."""
        prompt = [10 + draw.randrange(300) for _ in range(draw.randrange(3, 20))]
        guide, record = None, None
        if form is not None:
            compiled = await self.grammars.compile(form, self.tokenizer, VOCABULARY, ((),), opened=False)
            guide, record = RecordingGuide(compiled.guides[0]), compiled.record
        options = {"max_tokens": TOKENS_MAX, "stop_ids": self.tokenizer.stop_ids, "seed": draw.randrange(2**31), **how}
        sampling = Sampling(**options, grammar=record.text if record else "")
        start = Start(guide=guide)
        (tokens,) = [
            tokens
            async for tokens in self.engine.generate(prompt, sampling, self.manifest.version, [start], stream=False)
        ]
        return tokens, record, [] if guide is None else guide.masks, prompt

    def turn(self, tokens: Tokens, record: TokenGrammar | None, prompt: Sequence[int], **how: Any) -> Turn:
        """Return the turn that the gateway would record."""
        choice = (
            ask([user("x")])
            .choices[0]
            .model_copy(
                update={
                    "token_ids": tuple(tokens.token_ids),
                    "logprobs": tuple(tokens.logprobs),
                    "stored_sets": None if tokens.sets is None else tuple(tokens.sets),
                }
            )
        )
        grammar = Grammar(response_format={"type": "json_object"}) if record else None
        return ask(
            [user("x")],
            choices=(choice,),
            prompt_token_ids=tuple(prompt),
            usage=Usage(prompt_tokens=len(prompt), completion_tokens=len(tokens.token_ids)),
            sampling=RecordedSampling(grammar=grammar, **how),
            token_grammar=record,
            version=self.manifest.version,
        )


@pytest.fixture
async def replica(base: Path, tmp_path: Path) -> AsyncIterator[Replica]:
    blobs = BlobStore((tmp_path / "blobs").as_uri())
    manifest = versions.read_manifest(blobs, tiny_model.publish(blobs, base).manifest)
    engine = TorchEngine(TorchSettings.model_validate({"device": "cpu"}))
    await engine.load(base, manifest)
    grammars = GrammarCompiler(Parsers(HERMES), GrammarSettings())
    yield Replica(engine, ChatTokenizer(base, manifest), manifest, grammars)
    grammars.close()
    await engine.stop()


def experience_of(turn: Turn) -> Experience:
    """Return the experience of the turn, which must be in a branch."""
    event = build_trajectory(
        [turn], superseded=(), about_run=(), about_session=(), reason="end_call", models=1, turns_from=0, now=START
    )
    assert not event.left_out
    (branch,) = event.branches
    sent = Experience(
        time=START, experience_id=turn.turn_id, trajectory_id=event.trajectory_id, session_key=event.session_key,
        session_id="s", model=event.model, branch=branch, turn_ids=branch.turn_ids, reward=1.0,
    )  # fmt: skip
    return Experience.from_json(sent.to_json())


def row_of(experience: Experience, builder: SetBuilder, current: str) -> Row:
    assert experience.branch is not None
    return Row.of(experience, 1.0, current, sets=builder.build(experience.branch))


def allowed_ids(row: Row, start: int, count: int) -> list[list[int]]:
    """Return the tokens that the trainer allows at each position of an answer."""
    by_position: dict[int, Any] = {}
    if row.sets is not None:
        by_position = dict(zip(row.sets.positions_P.tolist(), row.sets.sets, strict=True))
    ids = []
    for position in range(start, start + count):
        each = by_position.get(position)
        if each is None:
            ids.append(list(range(VOCABULARY)))
        elif each.dtype == np.uint8:
            ids.append(np.flatnonzero(np.unpackbits(each, bitorder="little")[:VOCABULARY]).tolist())
        else:
            ids.append(each.tolist())
    return ids


def bits(mask: NDArray[np.int32]) -> list[int]:
    return [token for token in range(VOCABULARY) if mask[token // 32] >> (token % 32) & 1]


async def in_parallel(jobs: Sequence[Any]) -> list[Any]:
    results = []
    for first in range(0, len(jobs), PARALLEL):
        results += await asyncio.gather(*jobs[first : first + PARALLEL])
    return results


def mean_difference(base: Path, rows: Sequence[Row]) -> float:
    """Return the mean difference between the logprobs of trainer and engine, in packs of several rows."""
    policy, differences = open_policy(base), []
    for first in range(0, len(rows), PARALLEL):
        pack = policy.collate(list(rows[first : first + PARALLEL]))
        logprobs_N, entropy_N = policy.logprobs(pack)
        assert (entropy_N > -1e-5).all()
        differences.append((logprobs_N.detach() - pack.behaviour_N).abs())
    return float(np.concatenate([each.numpy() for each in differences]).mean())


COUNTS = [pytest.param(20, id="20"), pytest.param(200, id="200", marks=pytest.mark.long)]
CALLS = [pytest.param(20, id="20"), pytest.param(500, id="500", marks=pytest.mark.long)]


@pytest.mark.parametrize("count", COUNTS)
async def test_json_answers_are_trained_with_the_sets_that_the_engine_sampled_from(
    replica: Replica, base: Path, count: int
) -> None:
    draw = random.Random(draw_seed())
    schemas = [schema_of(draw) for _ in range(count)]
    draws = [random.Random(draw.randrange(2**31)) for _ in schemas]
    answers = await in_parallel(
        [replica.answer(each, AnswerForm(schema)) for each, schema in zip(draws, schemas, strict=True)]
    )
    builder, rows, complete = SetBuilder(base, VOCABULARY), [], 0
    for schema, (tokens, record, masks, prompt) in zip(schemas, answers, strict=True):
        if tokens.finish == "stop":
            complete += 1
            jsonschema.validate(json.loads(replica.tokenizer.text_of(tokens.token_ids)), schema)
        row = row_of(experience_of(replica.turn(tokens, record, prompt)), builder, replica.manifest.version)
        sets = allowed_ids(row, len(prompt), len(tokens.token_ids))
        assert sets == [bits(mask) for mask in masks], "recomputed sets are the engine's masks, bit for bit"
        forced = [len(allowed) == 1 for allowed in sets]
        assert all(logprob == 0.0 for logprob, is_forced in zip(tokens.logprobs, forced, strict=True) if is_forced)
        rows.append(row)
    assert complete > 0.9 * count
    assert mean_difference(base, rows) < 1e-5


@pytest.mark.parametrize("count", CALLS)
async def test_forced_calls_are_trained_with_the_sets_that_the_engine_sampled_from(
    replica: Replica, base: Path, count: int
) -> None:
    draw = random.Random(draw_seed())

    def form() -> AnswerForm:
        schema = {"type": "object", "properties": {"q": schema_of(draw, 1)}, "required": ["q"]}
        function = {"name": draw.choice(["search", "mark_it"]), "parameters": {**schema, "additionalProperties": False}}
        return AnswerForm(None, (Tool.model_validate({"function": function}),), forced=True, several=False)

    forms = [form() for _ in range(count)]
    draws = [random.Random(draw.randrange(2**31)) for _ in forms]
    answers = await in_parallel([replica.answer(*each) for each in zip(draws, forms, strict=True)])
    builder, rows = SetBuilder(base, VOCABULARY), []
    for tokens, record, masks, prompt in answers:
        row = row_of(experience_of(replica.turn(tokens, record, prompt)), builder, replica.manifest.version)
        assert allowed_ids(row, len(prompt), len(tokens.token_ids)) == [bits(mask) for mask in masks]
        rows.append(row)
    assert mean_difference(base, rows) < 1e-5


@pytest.mark.parametrize("count", CALLS)
async def test_truncated_answers_are_trained_with_their_stored_sets(replica: Replica, base: Path, count: int) -> None:
    draw = random.Random(draw_seed())
    ways: list[Json] = [
        {"top_k": 5}, {"top_p": 0.4}, {"top_p": 0.3, "top_k": 40, "temperature": 0.7}, {"min_p": 0.5},
        {"min_p": 0.4, "top_p": 0.5, "temperature": 1.25},
    ]  # fmt: skip
    hows = [draw.choice(ways) for _ in range(count)]
    forms = [AnswerForm({"type": "string", "maxLength": 20}) if draw.random() < 0.3 else None for _ in hows]
    draws = [random.Random(draw.randrange(2**31)) for _ in hows]
    answers = await in_parallel(
        [replica.answer(each, form, max_tokens=30, **how) for each, form, how in zip(draws, forms, hows, strict=True)]
    )
    builder, rows = SetBuilder(base, VOCABULARY), []
    for how, (tokens, record, masks, prompt) in zip(hows, answers, strict=True):
        row = row_of(experience_of(replica.turn(tokens, record, prompt, **how)), builder, replica.manifest.version)
        sets = allowed_ids(row, len(prompt), len(tokens.token_ids))
        assert all(len(allowed) <= how.get("top_k", VOCABULARY) for allowed in sets)
        assert all({*allowed} <= {*bits(mask)} for allowed, mask in zip(sets, masks, strict=False))
        rows.append(row)
    assert mean_difference(base, rows) < 1e-5


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
