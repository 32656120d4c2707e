"""Tests of the batch schedule: each sequence is sampled as if it ran alone, within exact limits of rows and memory.

Some tests run the schedule step by step, and check which rows compute and that no sequence starves.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from headrace_inference.engine import Sampling
from headrace_inference.errors import EngineFailed
from headrace_inference.torch_engine.batch import BatchLimits, DecodeBatch
from headrace_inference.torch_engine.loader import Loader, Model
from headrace_inference.torch_engine.sequence import Sequence
from tests.unit.inference.conftest import Models, prompt_of

CONTEXT = 112


@pytest.fixture(scope="module")
def model(models: Models) -> Model:
    loader = Loader(torch.device("cpu"), torch.float32, CONTEXT, trace=False)
    return loader.load(models.first.folder, models.first.manifest, None, None)


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def batch_of(model: Model, *, portion: int = 32, kv_tokens: int = 4096, prefixes: int = 2**22) -> DecodeBatch:
    kv_bytes = kv_tokens * model.kv_shape.token_bytes
    return DecodeBatch(
        model, BatchLimits(4, prefill_tokens_max=portion, kv_bytes_max=kv_bytes, prefix_bytes_max=prefixes)
    )


def sequence(prompt: list[int], tokens: int, *, owner: object = None, seed: int = 7, **how: Any) -> Sequence:
    return Sequence(
        owner=owner or object(), choice=0, tokens=[*prompt], prompt_length=len(prompt), limit=len(prompt) + tokens,
        sampling=Sampling(**how), seed=seed, stream=True,
    )  # fmt: skip


def run(batch: DecodeBatch, *sequences: Sequence) -> None:
    for sequence in sequences:
        batch.add(sequence)
    for _ in range(500):
        if not batch.is_busy:
            return
        batch.step()
    raise AssertionError("it never ends")


def alone(model: Model, like: Sequence) -> Sequence:
    """Return the sequence `like` sampled again alone, with enough memory."""
    how = {name: getattr(like.sampling, name) for name in ("temperature", "top_k", "top_logprobs")}
    limit = like.limit - like.prompt_length
    again = sequence(like.tokens[: like.prompt_length], limit, seed=like.seed, **how)
    run(batch_of(model, portion=CONTEXT, prefixes=0), again)
    return again


def assert_exact(model: Model, sampled: Sequence) -> None:
    expected = alone(model, sampled)
    assert sampled.tokens == expected.tokens
    assert sampled.logprobs == pytest.approx(expected.logprobs, abs=1e-4)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.6])
def test_keeping_every_token_is_no_truncation(model: Model, temperature: float) -> None:
    plain = sequence(prompt_of(9), 12, temperature=temperature)
    unlimited = sequence(prompt_of(9), 12, temperature=temperature, top_k=model.vocabulary)
    run(batch_of(model), plain)
    run(batch_of(model), unlimited)  # in a batch of its own, as one such row changes how all are drawn
    assert unlimited.tokens == plain.tokens
    assert unlimited.logprobs == pytest.approx(plain.logprobs, abs=1e-4)


def test_attention_sees_no_more_than_it_needs_and_all_of_that_up_to_the_end_of_the_context(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lengths are rounded up to multiples of 32, so that tensor shapes change rarely."""
    seen: dict[int, int] = {}
    for name in ("decode", "prefill"):
        real = getattr(model.program, name)

        def spied(weights: Any, ids: Any, at: Any, window: Any, *more: Any, real: Any = real) -> Any:
            seen[int(at.max())] = len(window)
            return real(weights, ids, at, window, *more)

        monkeypatch.setattr(model.program, name, spied)
    batch = batch_of(model)
    run(batch, sequence(prompt_of(34), CONTEXT - 34), sequence(prompt_of(3, 1), CONTEXT - 3))
    assert {at: window for at, window in seen.items() if window != 32 * (at // 32 + 1)} == {}
    assert max(seen) == CONTEXT - 2


def test_a_portion_of_prompts_is_bounded_and_at_most_half_of_it_is_padding(model: Model) -> None:
    """The expected sums exclude the last token of each prompt, which the first decode step computes."""

    def first_step(*lengths: int) -> list[int]:
        batch = batch_of(model)
        together = [sequence(prompt_of(length, salt), 5) for salt, length in enumerate(lengths)]
        for item in together:
            batch.add(item)
        batch.step()
        return [item.filled for item in together]

    assert first_step(17, 17) == [17, 17], "two of 16 are the whole portion of 32"
    assert first_step(17, 17, 17) == [17, 17, 0]
    assert first_step(3, 3, 9) == [3, 3, 9], "half of 3 x 8 is padding"
    assert first_step(3, 3, 10) == [3, 3, 0], "more than half of 3 x 9 would be"
    assert first_step(9, 33, 9) == [9, 0, 0], "nobody is preferred to one that has waited longer"


def test_padding_beside_a_full_row_harms_nobody(model: Model) -> None:
    """One row resumes a cached prompt up to the last KV position, while the other row has a longer prompt to
    compute."""
    batch = batch_of(model)
    cached = sequence(prompt_of(56), 4)
    run(batch, cached)
    full = sequence([*cached.tokens[:59], *prompt_of(5, 3)], 9)
    other = sequence(prompt_of(11, 4), 9)
    run(batch, full, other)
    assert full.cached == 59
    assert_exact(model, full)
    assert_exact(model, other)


def test_as_many_as_memory_holds_run_at_once(model: Model) -> None:
    batch = batch_of(model, kv_tokens=128)
    three = [sequence(prompt_of(60, salt), 2) for salt in range(3)]
    for item in three:
        batch.add(item)
    batch.step()
    assert batch.running == three[:2]
    run(batch)
    for item in three:
        assert_exact(model, item)


def test_where_only_decoding_rows_can_give_way_they_wait_and_lose_nothing(model: Model) -> None:
    """The KV memory has room for 192 tokens.

    One row needs this memory for its prompt. The other row has a cached prompt and outgrows its share.
    """
    batch = batch_of(model, portion=16, kv_tokens=192)
    cached = sequence(prompt_of(94), 1)
    run(batch, cached)
    long, grows = sequence(prompt_of(96, 1), 6), sequence(prompt_of(94), 9, seed=8)
    run(batch, long, grows)
    assert grows.cached > 0
    assert_exact(model, long)
    assert_exact(model, grows)


def test_a_longer_continuation_takes_the_place_of_what_it_continues(model: Model) -> None:
    batch = batch_of(model)
    first = sequence(prompt_of(40), 5)
    run(batch, first)
    size = batch._prefixes.bytes
    run(batch, sequence(prompt_of(40), 5))
    assert batch._prefixes.bytes == size, "the same tokens are kept once"
    run(batch, sequence(first.tokens, 5))
    assert len(batch._prefixes._entries) == 1
    assert batch._prefixes.find_longest(first.tokens)[1] == 45


def test_a_continuation_of_a_part_leaves_the_whole_to_others(model: Model) -> None:
    batch = batch_of(model)
    run(batch, sequence(prompt_of(60), 5))
    run(batch, sequence([*prompt_of(32), *prompt_of(30, 3)], 5))
    again = sequence(prompt_of(60), 5)
    run(batch, again)
    assert again.cached == 59
    assert len(batch._prefixes._entries) == 2


def test_one_row_that_went_astray_costs_neither_its_neighbour_a_token_nor_the_cache_an_entry(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = batch_of(model)
    begun = sequence(prompt_of(40), 1)
    run(batch, begun)
    lost, sound = sequence(begun.tokens, 9), sequence(prompt_of(7, 1), 9)
    real = model.program.decode

    def astray(*arguments: Any) -> Any:
        ids, logprobs, *rest = real(*arguments)
        logprobs[arguments[2][:, 0] == 40] = math.nan
        return ids, logprobs, *rest

    monkeypatch.setattr(model.program, "decode", astray)
    batch.add(lost)
    batch.add(sound)
    deliveries = batch.step()
    assert [(item, isinstance(news, EngineFailed)) for item, news in deliveries] == [(lost, True), (sound, False)]
    assert lost.cached == 40, "it went on with the whole entry, which would have gone had it ended well"
    assert batch._prefixes.find_longest(prompt_of(40))[1] == 40
    run(batch)
    assert_exact(model, sound)


def test_after_a_reset_nothing_decodes_until_somebody_comes(model: Model) -> None:
    batch = batch_of(model)
    batch.add(sequence(prompt_of(6), 9))
    batch.step()
    batch.reset()
    assert batch.step() == []
    again = sequence(prompt_of(9, 1), 9)
    run(batch, again)
    assert_exact(model, again)


def test_a_vocabulary_that_begins_one_more_word_of_bits_is_held_to_its_last_token(model: Model) -> None:
    class Last:
        error = ""

        def allowed(self) -> NDArray[np.int32]:
            return np.array([0, 1], np.int32)

        def accept(self, token: int) -> None: ...

    batch = batch_of(replace(model, vocabulary=33))
    batch.running = [sequence(prompt_of(3), 1)]
    batch.running[0].guide = Last()
    logits_RV = batch._sampler.apply_grammars(batch.running, torch.zeros(1, 33))
    assert logits_RV.isfinite().nonzero().tolist() == [[0, 32]]


def test_all_choices_of_an_aborted_generation_leave_whether_they_decode_or_not(model: Model) -> None:
    owner = object()
    aborted = [sequence(prompt_of(6, salt), 9, owner=owner) for salt in range(3)]
    aborted[2] = sequence(prompt_of(100, 2), 9, owner=owner)
    stays = sequence(prompt_of(6, 4), 9)
    batch = batch_of(model)
    for item in (aborted[0], aborted[1], stays, aborted[2]):
        batch.add(item)
    batch.step()
    assert len(batch.running) == 4
    batch.abort(owner)
    assert batch.running == [stays]
    run(batch)
    assert_exact(model, stays)
    batch.add(alone_gone := sequence(prompt_of(6), 9, owner=owner))
    batch.step()
    assert batch.running == [alone_gone]
    batch.abort(owner)
    assert not batch.is_busy


PORTION = 32


@pytest.fixture(scope="module")
def traced_model(models: Models) -> Model:
    loader = Loader(torch.device("cpu"), torch.float32, 2048, trace=True)
    return loader.load(models.first.folder, models.first.manifest, None, None)


@pytest.fixture
def batch(traced_model: Model) -> Iterator[DecodeBatch]:
    limits = BatchLimits(sequences_max=4, prefill_tokens_max=PORTION, kv_bytes_max=2**24, prefix_bytes_max=2**20)
    with torch.inference_mode():
        created = DecodeBatch(traced_model, limits)
        yield created
        created.close()


def endless_sequence(prompt: list[int], tokens: int = 1000, owner: object = None) -> Sequence:
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
    talking = endless_sequence(prompt_of(5))
    batch.add(talking)
    assert delivered(batch) == [talking]
    long = endless_sequence(prompt_of(10 * PORTION + 1, 1))
    batch.add(long)
    for portion in range(1, 10):
        assert delivered(batch) == [talking], "one token for each portion of the prompt"
        assert long.filled == portion * PORTION
    assert delivered(batch) == [talking, long]


def test_short_prompts_that_keep_coming_do_not_starve_a_long_one(batch: DecodeBatch) -> None:
    long = endless_sequence(prompt_of(4 * PORTION + 1, 1))
    batch.add(long)
    for salt in range(4):
        batch.add(endless_sequence(prompt_of(9, 2 + salt), tokens=1))
        batch.step()
    assert long in delivered(batch) or long.drawn > 0


def test_prompts_of_similar_length_are_computed_together(batch: DecodeBatch) -> None:
    together = [endless_sequence(prompt_of(length, length)) for length in (8, 9, 10)]
    for item in together:
        batch.add(item)
    assert set(delivered(batch)) == set(together), "after one step all of them have decoded"


def test_more_than_fit_wait_in_order(batch: DecodeBatch) -> None:
    sequences = [endless_sequence(prompt_of(6, salt), tokens=3) for salt in range(6)]
    for item in sequences:
        batch.add(item)
    assert delivered(batch) == sequences[:4]
    assert (len(batch.running), len(batch.waiting)) == (4, 2)
    for _ in range(2):
        batch.step()
    assert set(delivered(batch)) == set(sequences[4:])


def test_an_aborted_generation_leaves_at_once_with_all_its_choices(batch: DecodeBatch) -> None:
    owner = object()
    aborted, stays = endless_sequence(prompt_of(6, 1), owner=owner), endless_sequence(prompt_of(6, 2))
    aborted.followers = [endless_sequence(prompt_of(6, 1), owner=owner)]
    batch.add(aborted)
    batch.add(stays)
    batch.step()
    batch.abort(owner)
    assert delivered(batch) == [stays]
    assert (len(batch.running), len(batch.waiting)) == (1, 0)


def test_after_a_reset_nothing_is_left(batch: DecodeBatch) -> None:
    first, other = endless_sequence(prompt_of(6)), endless_sequence(prompt_of(200, 1))
    batch.add(first)
    batch.add(other)
    batch.step()
    assert set(batch.reset()) == {first, other}
    assert not batch.is_busy
    again = endless_sequence(prompt_of(6))
    batch.add(again)
    assert delivered(batch) == [again]
