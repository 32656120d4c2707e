"""The state of a sequence moves with its row, and KV of a failed row is never cached."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from headrace_inference.engine import Sampling
from headrace_inference.errors import EngineFailed
from headrace_inference.torch_engine.batch import BatchLimits, DecodeBatch
from headrace_inference.torch_engine.loader import Loader
from headrace_inference.torch_engine.model import Model
from headrace_inference.torch_engine.sequence import Sequence
from tests.unit.inference.conftest import Models, prompt_of


@pytest.fixture(scope="module")
def model(models: Models) -> Model:
    loader = Loader(torch.device("cpu"), torch.float32, 2048, trace=False)
    return loader.load(models.first.folder, models.first.manifest, None, None)


@pytest.fixture
def batch(model: Model) -> Iterator[DecodeBatch]:
    limits = BatchLimits(sequences_max=4, prefill_tokens_max=128, kv_bytes_max=2**24, prefix_bytes_max=2**22)
    with torch.inference_mode():
        created = DecodeBatch(model, limits)
        yield created
        created.close()


def sequence(length: int, tokens: int, salt: str = "", **sampling: Any) -> Sequence:
    prompt = prompt_of(length, salt=length)
    return Sequence(
        owner=object(), choice=0, tokens=prompt, prompt_length=length, limit=length + tokens,
        sampling=Sampling(**sampling), seed=length, stream=True, salt=salt,
    )  # fmt: skip


def test_a_row_that_moves_takes_its_penalties_along(batch: DecodeBatch) -> None:
    sequences = [sequence(20 + at, 3 + 9 * at, presence_penalty=1.5, frequency_penalty=0.5) for at in range(3)]
    for item in sequences:
        batch.add(item)
    for _ in range(30):
        batch.step()
        assert batch._sampler.counts is not None
        for row, item in enumerate(batch.running[: batch._decoding]):
            counted = {token: int(n) for token, n in enumerate(batch._sampler.counts[row].tolist()) if n}
            assert counted == Counter(item.tokens[item.prompt_length :]), f"row {row}"
        if not batch.busy:
            break
    assert not batch.busy


def test_kv_behind_logits_that_are_no_numbers_is_not_used_again(
    batch: DecodeBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = batch.model.program.decode

    def astray(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        ids, logprobs, every, logits = real(*arguments)
        return ids, torch.full_like(logprobs, float("nan")), every, logits

    monkeypatch.setattr(batch.model.program, "decode", astray)
    batch.add(sequence(64, 5))
    ((_, failure),) = batch.step()
    assert isinstance(failure, EngineFailed)
    monkeypatch.undo()
    assert batch._prefixes.bytes == 0
    after = sequence(64, 5)
    batch.add(after)
    batch.step()
    assert after.cached == 0


def test_kept_kv_is_found_with_its_own_salt_alone(batch: DecodeBatch) -> None:
    cached = []
    for salt in ("a", "a", "b", "", "b"):
        item = sequence(64, 2, salt)
        batch.add(item)
        while batch.busy:
            batch.step()
        cached.append(item.cached)
    assert [count > 0 for count in cached] == [False, True, False, False, True]
