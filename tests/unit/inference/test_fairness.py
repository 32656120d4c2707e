"""Tests of the division of rows and time in a batch between tenants, sessions and background work."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator

import pytest
import torch

from headrace_inference.engine import Sampling
from headrace_inference.torch_engine import fairness
from headrace_inference.torch_engine.batch import BatchLimits, DecodeBatch
from headrace_inference.torch_engine.fairness import TimeShares
from headrace_inference.torch_engine.loader import Loader, Model
from headrace_inference.torch_engine.sequence import Sequence
from tests.unit.inference.conftest import Models, prompt_of

ROWS = 8
PORTION = 64
_SALTS = itertools.count(1)


@pytest.fixture(scope="module")
def model(models: Models) -> Model:
    loader = Loader(torch.device("cpu"), torch.float32, 2048, trace=True)
    return loader.load(models.first.folder, models.first.manifest, None, None)


@pytest.fixture
def batch(model: Model) -> Iterator[DecodeBatch]:
    limits = BatchLimits(sequences_max=ROWS, prefill_tokens_max=PORTION, kv_bytes_max=2**24, prefix_bytes_max=2**20)
    with torch.inference_mode():
        opened = DecodeBatch(model, limits)
        yield opened
        opened.close()


def sequence(
    tenant: str, session: str = "", *, length: int = 6, tokens: int = 1000, background: bool = False
) -> Sequence:
    prompt = prompt_of(length, next(_SALTS))
    return Sequence(
        owner=object(),
        choice=0,
        tokens=prompt,
        prompt_length=length,
        limit=length + tokens,
        sampling=Sampling(),
        seed=7,
        stream=True,
        salt=tenant,
        session=session,
        background=background,
    )


def rows_of(batch: DecodeBatch) -> Counter[str]:
    return Counter(running.salt for running in batch.running)


def steps_until_first_token(batch: DecodeBatch, target: Sequence, limit: int = 50) -> int:
    for number in range(1, limit):
        if any(delivered is target for delivered, _ in batch.step()):
            return number
    raise AssertionError(f"no token within {limit} steps")


@pytest.mark.parametrize("background", [False, True])
def test_a_full_batch_makes_room_for_another_tenant_within_a_step(batch: DecodeBatch, background: bool) -> None:
    for _ in range(3 * ROWS):
        batch.add(sequence("heavy", background=background))
    for _ in range(5):
        batch.step()
    late = sequence("light")
    batch.add(late)
    assert steps_until_first_token(batch, late) <= 2
    assert rows_of(batch)["light"] == 1


def test_a_user_of_the_same_tenant_goes_before_its_evaluation(batch: DecodeBatch) -> None:
    for _ in range(200):
        batch.add(sequence("acme", length=3 * PORTION, background=True))
    for _ in range(5):
        batch.step()
    user = sequence("acme")
    batch.add(user)
    assert steps_until_first_token(batch, user) <= 2


def test_the_tenant_with_the_fewest_rows_joins_next() -> None:
    running = [sequence("a"), sequence("b"), sequence("b")]
    assert fairness.next_to_join([sequence("a")], running) == 0
    assert fairness.next_to_join([sequence("b"), sequence("a")], running) == 1
    assert fairness.next_to_join([sequence("b"), sequence("a"), sequence("c")], running) == 2
    assert fairness.next_to_join([sequence("c", background=True), sequence("b")], running) == 1


def test_rows_are_shared_equally_between_tenants_and_then_between_sessions(batch: DecodeBatch) -> None:
    for tenant, sessions in (("a", ("1", "1", "1", "1", "1", "1", "1", "2", "3")), ("b", ("1",) * 9)):
        for session in sessions:
            batch.add(sequence(tenant, session))
    batch.step()
    assert rows_of(batch) == {"a": 4, "b": 4}
    assert Counter(running.session for running in batch.running if running.salt == "a") == {"1": 2, "2": 1, "3": 1}


def test_choices_of_one_session_do_not_keep_another_session_of_its_tenant_out(batch: DecodeBatch) -> None:
    leader = sequence("open", "greedy")
    leader.followers = [sequence("open", "greedy") for _ in range(15)]
    batch.add(leader)
    batch.step()
    other = sequence("open", "modest")
    batch.add(other)
    assert steps_until_first_token(batch, other) <= 2


def test_a_tenant_alone_is_never_paused(batch: DecodeBatch) -> None:
    sequences = [sequence("only", str(number)) for number in range(ROWS)]
    for waiting in sequences:
        batch.add(waiting)
    for _ in range(30):
        assert {id(delivered) for delivered, _ in batch.step()} == set(map(id, batch.running))
    assert set(map(id, batch.running)) == set(map(id, sequences))


def test_a_short_prompt_is_computed_before_the_long_prompts_of_another_tenant(batch: DecodeBatch) -> None:
    for _ in range(4):
        batch.add(sequence("heavy", length=20 * PORTION))
    batch.step()
    short = sequence("light")
    batch.add(short)
    assert steps_until_first_token(batch, short) <= 2


def test_a_background_prompt_is_computed_in_small_portions_while_a_user_decodes(batch: DecodeBatch) -> None:
    batch.add(sequence("acme"))
    batch.step()
    long = sequence("acme", length=20 * PORTION, background=True)
    batch.add(long)
    for _ in range(10):
        before = long.filled
        assert len(batch.step()) == 1
        assert long.filled - before <= PORTION // fairness.PORTION_DIVISOR


def simulated(shares: TimeShares, batch: list[Sequence], step_s: dict[int, float], steps: int) -> dict[str, float]:
    """Return the seconds per token of each tenant, in a batch whose step time is proportional to its rows."""
    took_s, tokens = 0.0, Counter[str]()
    for _ in range(steps):
        shares.begin_step(batch)
        paused = shares.paused(batch)
        active = [running for running in batch if shares.flow_of(running) not in paused]
        shares.charge_step(active, step_s[len(active)])
        took_s += step_s[len(active)]
        tokens.update({running.salt for running in active})
    return {tenant: took_s / count for tenant, count in tokens.items()}


def test_a_tenant_with_many_rows_slows_one_with_few_at_most_twice_and_both_go_on() -> None:
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    for _ in range(12):
        heavy = rng.randint(2, 64)
        base, each = rng.uniform(0.001, 0.01), rng.uniform(0.0, 0.01)
        step_s = {rows: base + each * rows for rows in range(1, 70)}
        batch = [sequence("heavy") for _ in range(heavy)] + [sequence("light")]
        seconds = simulated(TimeShares(), batch, step_s, 1000)
        assert seconds["light"] <= 2.05 * step_s[1], f"SEED={seed}"
        assert seconds["heavy"] <= 2 * step_s[heavy + 1] + step_s[1], f"SEED={seed}"


def test_background_work_takes_at_most_half_of_the_time_of_users_and_all_when_they_are_gone() -> None:
    step_s = {rows: 0.002 + 0.001 * rows for rows in range(1, 70)}
    evaluation = [sequence("gate", background=True) for _ in range(32)]
    shares = TimeShares()
    seconds = simulated(shares, [*evaluation, sequence("user")], step_s, 1000)
    assert seconds["user"] <= 2.05 * step_s[1]
    assert seconds["gate"] <= 2 * step_s[33] + step_s[1]
    assert simulated(shares, evaluation, step_s, 100)["gate"] == pytest.approx(step_s[32])


def test_equal_tenants_decode_together() -> None:
    step_s = {rows: 0.002 + 0.001 * rows for rows in range(1, 70)}
    batch = [sequence(tenant) for tenant in "abcd" for _ in range(4)]
    seconds = simulated(TimeShares(), batch, step_s, 500)
    assert all(second == pytest.approx(step_s[16]) for second in seconds.values())


def test_paused_rows_go_on_with_exactly_their_own_tokens(model: Model) -> None:
    """Rows move within the batch while they are paused, and still sample the tokens that they sample alone."""

    def drawn(*sequences: Sequence) -> list[list[int]]:
        limits = BatchLimits(ROWS, PORTION, 2**24, 0)
        with torch.inference_mode():
            opened = DecodeBatch(model, limits)
            for waiting in sequences:
                opened.add(waiting)
            while opened.busy:
                opened.step()
            opened.close()
        return [sequence.tokens for sequence in sequences]

    def fresh() -> list[Sequence]:
        sequences = []
        for number in range(12):
            item = sequence("light" if number % 5 == 0 else "heavy", str(number), tokens=20 + number)
            item.tokens, item.seed = prompt_of(9, number), number
            item.prompt_length, item.limit = 9, 29 + number
            item.background = number % 7 == 3
            sequences.append(item)
        return sequences

    alone = [drawn(item)[0] for item in fresh()]
    assert drawn(*fresh()) == alone
