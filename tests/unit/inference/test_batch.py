"""The schedule of a batch, one step at a time: the rows that compute, and that no sequence starves."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from headrace_inference.engine import Sampling
from headrace_inference.torch_engine.batch import BatchLimits, DecodeBatch
from headrace_inference.torch_engine.loader import Loader
from headrace_inference.torch_engine.model import Model
from headrace_inference.torch_engine.sequence import Sequence
from tests.unit.inference.conftest import Models, prompt_of

PORTION = 32


@pytest.fixture(scope="module")
def model(models: Models) -> Model:
    loader = Loader(torch.device("cpu"), torch.float32, 2048, trace=True)
    return loader.load(models.first.folder, models.first.manifest, None, None)


@pytest.fixture
def batch(model: Model) -> Iterator[DecodeBatch]:
    limits = BatchLimits(sequences_max=4, prefill_tokens_max=PORTION, kv_bytes_max=2**24, prefix_bytes_max=2**20)
    with torch.inference_mode():
        created = DecodeBatch(model, limits)
        yield created
        created.close()


def sequence(prompt: list[int], tokens: int = 1000, owner: object = None) -> Sequence:
    return Sequence(
        owner=owner or object(),
        choice=0,
        tokens=[*prompt],
        prompt_length=len(prompt),
        limit=len(prompt) + tokens,
        sampling=Sampling(),
        seed=len(prompt),
        stream=True,
    )


def delivered(batch: DecodeBatch) -> list[Sequence]:
    return [item for item, _ in batch.step()]


def test_a_long_prompt_never_keeps_the_others_from_decoding(batch: DecodeBatch) -> None:
    talking = sequence(prompt_of(5))
    batch.add(talking)
    assert delivered(batch) == [talking]
    long = sequence(prompt_of(10 * PORTION + 1, 1))
    batch.add(long)
    for portion in range(1, 10):
        assert delivered(batch) == [talking], "one token for each portion of the prompt"
        assert long.filled == portion * PORTION
    assert delivered(batch) == [talking, long]


def test_short_prompts_that_keep_coming_do_not_starve_a_long_one(batch: DecodeBatch) -> None:
    long = sequence(prompt_of(4 * PORTION + 1, 1))
    batch.add(long)
    for salt in range(4):
        batch.add(sequence(prompt_of(9, 2 + salt), tokens=1))
        batch.step()
    assert long in delivered(batch) or long.drawn > 0


def test_prompts_of_similar_length_are_computed_together(batch: DecodeBatch) -> None:
    together = [sequence(prompt_of(length, length)) for length in (8, 9, 10)]
    for item in together:
        batch.add(item)
    assert set(delivered(batch)) == set(together), "after one step all of them have decoded"


def test_more_than_fit_wait_in_order(batch: DecodeBatch) -> None:
    sequences = [sequence(prompt_of(6, salt), tokens=3) for salt in range(6)]
    for item in sequences:
        batch.add(item)
    assert delivered(batch) == sequences[:4]
    assert (len(batch.running), len(batch.waiting)) == (4, 2)
    for _ in range(2):
        batch.step()
    assert set(delivered(batch)) == set(sequences[4:])


def test_an_aborted_generation_leaves_at_once_with_all_its_choices(batch: DecodeBatch) -> None:
    owner = object()
    aborted, stays = sequence(prompt_of(6, 1), owner=owner), sequence(prompt_of(6, 2))
    aborted.followers = [sequence(prompt_of(6, 1), owner=owner)]
    batch.add(aborted)
    batch.add(stays)
    batch.step()
    batch.abort(owner)
    assert delivered(batch) == [stays]
    assert (len(batch.running), len(batch.waiting)) == (1, 0)


def test_after_a_reset_nothing_is_left(batch: DecodeBatch) -> None:
    first, other = sequence(prompt_of(6)), sequence(prompt_of(200, 1))
    batch.add(first)
    batch.add(other)
    batch.step()
    assert set(batch.reset()) == {first, other}
    assert not batch.busy
    again = sequence(prompt_of(6))
    batch.add(again)
    assert delivered(batch) == [again]
