"""Answers that a grammar or truncation restricted, checked from the engine's sampler to the trainer's logprobs.

The module also runs in vLLM's environment, which has neither faust nor a database.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
from numpy.typing import NDArray

from headrace_collector.closing import build_trajectory
from headrace_inference.chat.parsers import Parsers
from headrace_inference.chat.tokenizer import ChatTokenizer
from headrace_inference.chat.tool_calls import HERMES
from headrace_inference.engine import Engine, Guide, Sampling, Start, Tokens
from headrace_inference.grammar.compiler import GrammarCompiler
from headrace_inference.grammar.forms import AnswerForm
from headrace_runtime.grammars.vocabulary import allows
from headrace_schemas import Experience, Grammar, TokenGrammar, Tool, Turn, Usage
from headrace_schemas import Sampling as RecordedSampling
from headrace_schemas.values.blobs import Manifest
from headrace_trainer.batches.batch import Row
from headrace_trainer.experiences.restrictions import SetBuilder
from headrace_trainer.settings import ComputeSettings, LoraSettings
from headrace_trainer.torch_learner.model.policy import Policy
from tests.support.presence import draw_seed
from tests.support.turns import START, ask, user

VOCABULARY = 320
"""Number of token ids of `tiny_model`."""
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
    """Grammar guide that stores a copy of each mask that the sampler requested."""

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
    """A loaded version in the engine, with the compiler of its grammars."""

    engine: Engine
    tokenizer: ChatTokenizer
    manifest: Manifest
    base: Path
    grammars: GrammarCompiler = field(default_factory=lambda: GrammarCompiler(Parsers(HERMES)))
    masks_of: Callable[[TokenGrammar, Sequence[int]], list[NDArray[np.int32]]] | None = None
    """Function that returns the engine's own masks, if the engine samples without the guide."""

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
        masks = [] if guide is None else guide.masks
        if record is not None and self.masks_of is not None:
            masks = self.masks_of(record, tokens.token_ids)
        return tokens, record, masks, prompt

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
    return [token for token in range(VOCABULARY) if allows(mask, token)]


async def in_parallel(jobs: Sequence[Any]) -> list[Any]:
    results = []
    for first in range(0, len(jobs), PARALLEL):
        results += await asyncio.gather(*jobs[first : first + PARALLEL])
    return results


def mean_difference(base: Path, rows: Sequence[Row]) -> float:
    """Return the mean difference between the logprobs of trainer and engine, in packs of several rows."""
    policy, differences = Policy.open(base, ComputeSettings(device="cpu"), LoraSettings(rank=0), seed=1), []
    for first in range(0, len(rows), PARALLEL):
        pack = policy.collate(list(rows[first : first + PARALLEL]))
        logprobs_N, entropy_N = policy.logprobs(pack)
        assert (entropy_N > -1e-5).all()
        differences.append((logprobs_N.detach() - pack.behaviour_N).abs())
    return float(np.concatenate([each.numpy() for each in differences]).mean())


async def play_json_answers(replica: Replica, count: int) -> float:
    """Sample answers to random schemas, check the trainer's sets, and return its mean difference in logprob."""
    draw = random.Random(draw_seed())
    schemas = [schema_of(draw) for _ in range(count)]
    draws = [random.Random(draw.randrange(2**31)) for _ in schemas]
    answers = await in_parallel(
        [replica.answer(each, AnswerForm(schema)) for each, schema in zip(draws, schemas, strict=True)]
    )
    builder, rows, complete = SetBuilder(replica.base, VOCABULARY), [], 0
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
    return mean_difference(replica.base, rows)


async def play_forced_calls(replica: Replica, count: int) -> float:
    """Sample forced calls, check the trainer's sets, and return its mean difference in logprob."""
    draw = random.Random(draw_seed())

    def form() -> AnswerForm:
        schema = {"type": "object", "properties": {"q": schema_of(draw, 1)}, "required": ["q"]}
        function = {"name": draw.choice(["search", "mark_it"]), "parameters": {**schema, "additionalProperties": False}}
        return AnswerForm(None, (Tool.model_validate({"function": function}),), forced=True, several=False)

    forms = [form() for _ in range(count)]
    draws = [random.Random(draw.randrange(2**31)) for _ in forms]
    answers = await in_parallel([replica.answer(*each) for each in zip(draws, forms, strict=True)])
    builder, rows = SetBuilder(replica.base, VOCABULARY), []
    for tokens, record, masks, prompt in answers:
        row = row_of(experience_of(replica.turn(tokens, record, prompt)), builder, replica.manifest.version)
        assert allowed_ids(row, len(prompt), len(tokens.token_ids)) == [bits(mask) for mask in masks]
        rows.append(row)
    return mean_difference(replica.base, rows)


async def play_truncated_answers(replica: Replica, count: int, ways: Sequence[Json]) -> float:
    """Sample truncated answers, some of them with a grammar, and return the trainer's mean difference in logprob."""
    draw = random.Random(draw_seed())
    hows = [draw.choice(ways) for _ in range(count)]
    forms = [AnswerForm({"type": "string", "maxLength": 20}) if draw.random() < 0.3 else None for _ in hows]
    draws = [random.Random(draw.randrange(2**31)) for _ in hows]
    answers = await in_parallel(
        [replica.answer(each, form, max_tokens=30, **how) for each, form, how in zip(draws, forms, hows, strict=True)]
    )
    builder, rows = SetBuilder(replica.base, VOCABULARY), []
    for how, (tokens, record, masks, prompt) in zip(hows, answers, strict=True):
        row = row_of(experience_of(replica.turn(tokens, record, prompt, **how)), builder, replica.manifest.version)
        sets = allowed_ids(row, len(prompt), len(tokens.token_ids))
        assert all(len(allowed) <= how.get("top_k", VOCABULARY) for allowed in sets)
        assert all({*allowed} <= {*bits(mask)} for allowed, mask in zip(sets, masks, strict=False))
        rows.append(row)
    return mean_difference(replica.base, rows)
