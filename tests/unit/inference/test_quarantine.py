"""Tests of failed steps and of grammar masks.

A step that fails ends only the sequences that cause the failure. The application of a grammar's bit mask to logits is
compared with plain arithmetic on each bit.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from headrace_inference.engine import Sampling, Start, Tokens
from headrace_inference.errors import EngineFailed
from headrace_inference.torch_engine.batch import BatchLimits, DecodeBatch
from headrace_inference.torch_engine.engine import TorchEngine
from headrace_inference.torch_engine.loader import Loader, Model
from headrace_inference.torch_engine.sampler import mask_forbidden
from headrace_inference.torch_engine.sequence import Sequence
from tests.support.presence import draw_seed
from tests.unit.inference.conftest import Models, prompt_of, sample

POISON = [7, 7, 7, 7]
"""Tokens that no prompt of `prompt_of` holds; computing a prompt with them raises. A recovered sequence computes its
sampled tokens as a prompt, so a single token would sometimes be sampled by an innocent sequence."""
FAR = 150
"""Decoding at this position or behind it raises; other sequences of these tests end before it."""
ROUNDS = 12


class PoisonedError(Exception):
    """Error that the model's code raises in these tests."""


@pytest.fixture(scope="module")
def healthy_model(models: Models) -> Model:
    loader = Loader(torch.device("cpu"), torch.float32, 2048, trace=True)
    return loader.load(models.first.folder, models.first.manifest, None, None)


@pytest.fixture
def model(healthy_model: Model, monkeypatch: pytest.MonkeyPatch) -> Iterator[Model]:
    """Yield the tiny model. Its prefill raises for a row with all tokens of `POISON`, its decode at the position
    `FAR`."""
    poison(healthy_model, monkeypatch)
    with torch.inference_mode():
        yield healthy_model


def poison(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill, decode = model.program.prefill, model.program.decode

    def raising_prefill(weights: Any, ids: torch.Tensor, *inputs: Any) -> Any:
        if any(row[at : at + len(POISON)] == POISON for row in ids.tolist() for at in range(len(row))):
            raise PoisonedError
        return prefill(weights, ids, *inputs)

    def raising_decode(weights: Any, ids: torch.Tensor, at: torch.Tensor, *inputs: Any) -> Any:
        if bool((at >= FAR).any()):
            raise PoisonedError
        return decode(weights, ids, at, *inputs)

    monkeypatch.setattr(model.program, "prefill", raising_prefill)
    monkeypatch.setattr(model.program, "decode", raising_decode)


def sequence(prompt: list[int], tokens: int, number: int) -> Sequence:
    return Sequence(
        owner=object(),
        choice=0,
        tokens=[*prompt],
        prompt_length=len(prompt),
        limit=len(prompt) + tokens,
        sampling=Sampling(),
        seed=number,
        stream=True,
    )


def finished(batch: DecodeBatch, steps_max: int = 2000) -> tuple[dict[int, list[int]], dict[int, str]]:
    """Run the batch to its end and recover as the worker does. Return the tokens and the failures by seed."""
    tokens: dict[int, list[int]] = {}
    failures: dict[int, str] = {}
    for _ in range(steps_max):
        if not batch.is_busy:
            return tokens, failures
        try:
            deliveries = batch.step()
        except Exception as error:  # noqa: BLE001
            deliveries = batch.recover(error)
        for owner, piece in deliveries:
            if isinstance(piece, EngineFailed):
                assert owner.seed not in failures, "told twice"
                failures[owner.seed] = str(piece)
            else:
                tokens.setdefault(owner.seed, []).extend(piece.token_ids)
    raise AssertionError(f"{len(batch.running)} sequences still run after {steps_max} steps")


def batch_of(model: Model, sequences_max: int) -> DecodeBatch:
    limits = BatchLimits(sequences_max, prefill_tokens_max=64, kv_bytes_max=2**24, prefix_bytes_max=2**20)
    return DecodeBatch(model, limits)


def test_only_the_sequences_that_make_steps_fail_end_and_the_others_sample_what_they_would_alone(model: Model) -> None:
    seed = draw_seed()
    draw = random.Random(seed)
    for _ in range(ROUNDS):
        count = draw.randrange(1, 14)
        lengths = [draw.randrange(2, 90) for _ in range(count)]
        prompts = [prompt_of(length, number) for number, length in enumerate(lengths)]
        expected, none = finished_alone(model, prompts)
        assert not none
        guilty = set(draw.sample(range(count), draw.randrange(0, min(count, 4) + 1)))
        for number in guilty:
            if draw.random() < 0.5:
                prompts[number] = prompt_of(FAR - draw.randrange(5), number)
            else:
                prompts[number][:0] = POISON
        batch = batch_of(model, draw.choice([4, 16]))
        for number, prompt in enumerate(prompts):
            batch.add(sequence(prompt, 9, number))
        tokens, failures = finished(batch)
        assert set(failures) == guilty
        assert all("PoisonedError" in reason for reason in failures.values())
        for number in set(range(count)) - guilty:
            assert tokens[number] == expected[number], f"sequence {number} of {count}, guilty {guilty}"


def finished_alone(model: Model, prompts: list[list[int]]) -> tuple[dict[int, list[int]], dict[int, str]]:
    batch = batch_of(model, 1)
    for number, prompt in enumerate(prompts):
        batch.add(sequence(prompt, 9, number))
    return finished(batch)


@pytest.mark.parametrize("where", ["until", "guide.accept", "guide.allowed"])
def test_code_of_a_sequence_that_raises_ends_this_sequence_without_a_retry(model: Model, where: str) -> None:
    class Guide:
        error = ""

        def allowed(self) -> Any:
            if where == "guide.allowed":
                raise PoisonedError
            return torch.full((20,), -1, dtype=torch.int32).numpy()

        def accept(self, _token: int) -> None:
            if where == "guide.accept":
                raise PoisonedError

    def until(_token: int) -> bool:
        raise PoisonedError

    batch = batch_of(model, 4)
    for number in range(3):
        batch.add(sequence(prompt_of(9, number), 9, number))
    guilty = batch.waiting[1]
    if where == "until":
        guilty.until = until
    else:
        guilty.guide = Guide()
    deliveries = batch.step()
    failed = [owner for owner, piece in deliveries if isinstance(piece, EngineFailed)]
    assert failed == [guilty]
    assert "PoisonedError" in str(dict(deliveries)[guilty])
    tokens, failures = finished(batch)
    assert not failures
    assert {number: len(ids) for number, ids in tokens.items()} == {0: 8, 2: 8}


@pytest.mark.parametrize("astray", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("every", [False, True])
@pytest.mark.parametrize("how", [{"temperature": 0.0}, {}, {"top_k": 3}, {"frequency_penalty": 0.5}])
def test_logits_that_are_not_finite_end_their_own_row(
    model: Model, monkeypatch: pytest.MonkeyPatch, astray: float, every: bool, how: dict[str, Any]
) -> None:
    """NaN in any logit of a row fails the row. A logit of -inf is a token that cannot be sampled."""
    from headrace_inference.torch_engine.sampler import draw

    real = model.program.decode

    def spoiled(weights: Any, ids: Any, at: Any, window: Any, kv: Any, temperature: Any, uniform: Any) -> Any:
        logits = real(weights, ids, at, window, kv, temperature, uniform)[3]
        rows = at[:, 0] == 40
        logits[rows, 0 if every else 300 :] = astray
        return *draw(logits, temperature, uniform), logits

    monkeypatch.setattr(model.program, "decode", spoiled)
    batch = batch_of(model, 4)
    for number, length in enumerate((41, 9, 12)):
        batch.add(sequence(prompt_of(length, number), 9, number))
        batch.waiting[-1].sampling = Sampling(**how)
    tokens, failures = finished(batch)
    assert set(failures) == (set() if astray == -math.inf and not every else {0})
    assert [len(tokens[number]) for number in (1, 2)] == [9, 9]


async def test_requests_cannot_end_the_engine(
    engine: TorchEngine, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = models.first.version
    poison(engine._models[version][0], monkeypatch)
    innocent = [asyncio.create_task(sample(engine, prompt_of(9, salt), version, max_tokens=30)) for salt in range(4)]
    for salt in range(4):  # one more than the failures that end an engine
        lost = engine.generate([*prompt_of(5, salt), *POISON, 9], Sampling(), version, [Start()], stream=True)
        with pytest.raises(EngineFailed, match="PoisonedError"):
            async for _ in lost:
                pass
    assert engine.alive
    results: list[Tokens] = await asyncio.gather(*innocent)
    assert [len(tokens.token_ids) for tokens in results] == [30] * 4
    assert engine.in_flight() == 0


@pytest.mark.parametrize("vocabulary", [31, 32, 33, 40, 64, 100])
def test_only_tokens_whose_bit_is_set_stay_possible_and_other_rows_are_as_they_were(vocabulary: int) -> None:
    print(f"seed {vocabulary}")
    draw = random.Random(vocabulary)
    words = (vocabulary + 31) // 32
    masks = [[draw.randrange(2**32) for _ in range(words)] for _ in range(2)]
    signed = [[word - 2**32 if word >= 2**31 else word for word in mask] for mask in masks]
    logits = torch.arange(3.0 * vocabulary).reshape(3, vocabulary)
    before = logits.clone()
    masked = mask_forbidden(logits, torch.tensor([0, 2]), torch.tensor(signed, dtype=torch.int32))
    assert torch.equal(masked[1], before[1])
    for row, mask in zip((0, 2), masks, strict=True):
        for token in range(vocabulary):
            possible = bool(mask[token // 32] >> (token % 32) & 1)
            assert float(masked[row, token]) == (float(before[row, token]) if possible else -math.inf)
