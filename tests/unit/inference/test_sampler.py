"""Tests of the sampler: correct distribution, independence of the batch, and no impossible tokens.

The state of a sequence moves with its row, and KV of a failed row is never cached.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from headrace_inference.engine import Sampling
from headrace_inference.errors import EngineFailed
from headrace_inference.torch_engine import sampler
from headrace_inference.torch_engine.batch import BatchLimits, DecodeBatch
from headrace_inference.torch_engine.loader import Loader, Model
from headrace_inference.torch_engine.sequence import Sequence
from tests.unit.inference.conftest import Models, prompt_of


def test_the_uniform_stream_is_flat_and_differs_between_seeds() -> None:
    drawn = np.arange(200_000, dtype=np.uint64)
    first, other = (sampler.uniform(np.full_like(drawn, seed), drawn) for seed in (1, 2))
    for stream in (first, other):
        assert stream.min() >= 0.0
        assert stream.max() < 1.0
        counts, _ = np.histogram(stream, 20, (0, 1))
        chi_square = ((counts - 10_000) ** 2 / 10_000).sum()
        assert chi_square < 50, "19 degrees of freedom; 43.8 is the 99.9 % quantile"
    assert abs(np.corrcoef(first, other)[0, 1]) < 0.01
    assert abs(np.corrcoef(first[1:], first[:-1])[0, 1]) < 0.01


def test_uniform_numbers_are_known_and_must_never_change() -> None:
    """A replica of another release must draw the same numbers: SplitMix64 of the seeds 0 and 1234567."""
    seeds = np.array([0, 0, 1234567], dtype=np.uint64)
    drawn = np.array([0, 1, 0], dtype=np.uint64)
    reference = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x599ED017FB08FC85]  # published test vectors of SplitMix64
    assert sampler.uniform(seeds, drawn).tolist() == [(bits >> 11) * 2.0**-53 for bits in reference]


def test_choices_and_seeds_have_streams_of_their_own() -> None:
    streams = {sampler.seed_of(seed, choice) for seed in (-5, 0, 1, 2, 2**63) for choice in range(16)}
    assert len(streams) == 5 * 16
    assert sampler.seed_of(7, 3) == sampler.seed_of(7, 3)
    assert sampler.seed_of(2**70 + 1, 0) == sampler.seed_of(1, 0), "seeds have 64 bits"


def test_frequencies_are_the_reported_probabilities() -> None:
    """Compare 200,000 draws at temperature 0.7 with the softmax by a chi-square test."""
    torch.manual_seed(0)
    logits = torch.randn(1, 24) * 2
    rows = 200_000
    uniform = torch.from_numpy(sampler.uniform(np.full(rows, 9, np.uint64), np.arange(rows, dtype=np.uint64)))
    ids, logprobs, _ = sampler.draw(logits.expand(rows, -1), torch.full((rows,), 0.7), uniform)
    expected = (logits[0] / 0.7).softmax(-1)
    assert torch.allclose(logprobs.exp(), expected[ids], atol=1e-6)
    counts = torch.bincount(ids, minlength=24)
    likely = expected * rows > 5
    chi_square = ((counts - expected * rows)[likely] ** 2 / (expected * rows)[likely]).sum()
    assert chi_square < 60, "at most 23 degrees of freedom; 49.7 is the 99.9 % quantile"


@pytest.mark.parametrize("uniform", [0.0, 1 - 2.0**-53, 0.5])
def test_an_impossible_token_is_never_drawn(uniform: float) -> None:
    """The uniform numbers include both ends of the interval, where rounding matters."""
    logits = torch.full((3, 1000), float("-inf"))
    logits[0, 500] = 0.0
    logits[1, [0, 999]] = torch.tensor([0.0, -30.0])
    logits[2, 1:999] = 0.0
    ids, logprobs, _ = sampler.draw(logits, torch.ones(3), torch.full((3,), uniform, dtype=torch.float64))
    assert torch.isfinite(logprobs).all()
    assert ids[0] == 500


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_disturb_no_other_row(temperature: float) -> None:
    logits = torch.zeros(3, 10)
    logits[1] = float("nan")
    ids, logprobs, _ = sampler.draw(logits, torch.full((3,), temperature), torch.full((3,), 0.5, dtype=torch.float64))
    assert logprobs.isnan().tolist() == [False, True, False]
    assert ids[0] == ids[2]
    assert 0 <= ids[1] < 10


def test_truncation_matches_a_plain_reference() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    torch.manual_seed(seed)
    logits = torch.randn(40, 30)
    top_p = torch.rand(40) * 0.98 + 0.01
    top_k = torch.randint(0, 12, (40,))
    min_p = torch.rand(40) * (torch.arange(40) % 2)
    top_p[:5] = 1.0
    truncated = sampler.truncate(logits, top_p, top_k, min_p)
    for row in range(40):
        expected = _reference(logits[row], float(top_p[row]), int(top_k[row]), float(min_p[row]))
        assert set(torch.isfinite(truncated[row]).nonzero()[:, 0].tolist()) == expected
        assert torch.equal(truncated[row][sorted(expected)], logits[row][sorted(expected)])


def _reference(logits: torch.Tensor, top_p: float, top_k: int, min_p: float) -> set[int]:
    """Return the kept tokens by the definitions in the papers, one token at a time."""
    shares = logits.softmax(-1)
    likely = [token for token in range(len(logits)) if shares[token] >= min_p * shares.max()]
    order = sorted(likely, key=lambda token: -float(logits[token]))
    order = order[:top_k] if top_k else order
    weights = logits[order].softmax(-1).tolist()
    tokens: set[int] = set()
    mass = 0.0
    for token, weight in zip(order, weights, strict=True):
        if top_p < 1.0 and mass >= top_p:
            break
        tokens.add(token)
        mass += weight
    return tokens


def test_penalties_are_openais() -> None:
    logits = torch.zeros(2, 3)
    counts = torch.tensor([[0.0, 1.0, 3.0], [2.0, 0.0, 0.0]])
    penalised = sampler.penalise(logits, counts, torch.tensor([0.5, -1.0]), torch.tensor([0.25, 0.0]))
    assert penalised.tolist() == [[0.0, -0.75, -1.25], [1.0, 0.0, 0.0]]


def test_a_choices_stream_is_known_and_must_never_change() -> None:
    """The random stream of a choice comes from two rounds of SplitMix64: of the seed, then of the choice index."""
    for seed, choice in ((0, 0), (0, 1), (7, 3), (2**63, 2)):
        assert sampler.seed_of(seed, choice) == _mixed(_mixed(seed + 0x9E3779B97F4A7C15) + choice)


def _mixed(bits: int) -> int:
    bits %= 2**64
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    bits = (bits ^ bits >> 27) * 0x94D049BB133111EB % 2**64
    return bits ^ bits >> 31


def test_a_token_is_drawn_where_the_number_falls_among_the_probabilities() -> None:
    """The probabilities are 1/2, 0, 1/4 and 1/4. A number on a boundary selects the next token with probability > 0."""
    logits = torch.tensor([0.5, 0.0, 0.25, 0.25]).log().expand(6, -1)
    drawn = torch.tensor([0.0, 0.499, 0.5, 0.7499, 0.75, 0.9999], dtype=torch.float64)
    ids, logprobs, every = sampler.draw(logits, torch.ones(6), drawn)
    assert ids.tolist() == [0, 0, 2, 2, 3, 3]
    assert logprobs.tolist() == [every[row, token] for row, token in enumerate(ids.tolist())]


def test_rows_have_temperatures_of_their_own_and_at_zero_the_best_is_taken_as_it_is() -> None:
    logits = torch.tensor([[1.0, 3.0], [3.0, 1.0], [1.0, 4.0]]).log()
    ids, _, every = sampler.draw(logits, torch.tensor([0.0, 0.0, 0.5]), torch.zeros(3, dtype=torch.float64))
    assert ids.tolist() == [1, 0, 0]
    shares = [[1 / 4, 3 / 4], [3 / 4, 1 / 4], [1 / 17, 16 / 17]]
    assert torch.allclose(every.exp(), torch.tensor(shares)), "half the temperature squares the odds"


def test_truncation_by_hand() -> None:
    """Test four equally likely tokens, tokens whose probability rounds to 0, and a token with 1/3 of the best
    probability."""
    even, lost, third = [0.0] * 4, [0.0, -200.0, -200.0, -200.0], [0.0, math.log(1 / 3), -9.0, -9.0]
    rows = [
        (even, 1.0, 1, 0.0), (even, 1.0, 0, 0.0), (even, 0.5, 0, 0.0), (even, 0.6, 0, 0.0), (even, 0.9, 2, 0.0),
        (lost, 1.0, 0, 0.0), (even, 1.0, 0, 1.0), (third, 1.0, 0, 0.3), (third, 1.0, 0, 0.4), (even, 0.5, 0, 0.5),
    ]  # fmt: skip
    logits, *columns = (torch.tensor(column) for column in zip(*rows, strict=True))
    counts = torch.isfinite(sampler.truncate(logits, *columns)).sum(1)
    assert counts.tolist() == [1, 4, 2, 3, 2, 4, 4, 2, 1, 2]
    row = slice(1, 2)
    assert torch.equal(sampler.truncate(logits[row], *(column[row] for column in columns)), logits[row]), "one row"


def test_the_most_likely_come_first_and_never_more_than_there_are() -> None:
    logprobs = torch.tensor([[-3.0, -1.0, -2.0], [-1.5, -0.5, -4.0]])
    assert sampler.most_likely(logprobs, 2) == [[(1, -1.0), (2, -2.0)], [(1, -0.5), (0, -1.5)]]
    assert [len(row) for row in sampler.most_likely(logprobs, 9)] == [3, 3]


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
        if not batch.is_busy:
            break
    assert not batch.is_busy


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
        while batch.is_busy:
            batch.step()
        cached.append(item.cached)
    assert [count > 0 for count in cached] == [False, True, False, False, True]
