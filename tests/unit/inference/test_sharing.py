"""Tests of what requests share: the KV cache of prompt prefixes, and the rows and the time of a batch."""

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
from headrace_inference.torch_engine.kv import BLOCK, KV, KVShape, PrefixCache
from headrace_inference.torch_engine.loader import Loader, Model
from headrace_inference.torch_engine.sequence import Sequence
from tests.unit.inference.conftest import Models, prompt_of

SHAPE = KVShape(layers=1, heads=1, size=2, dtype=torch.float32, device=torch.device("cpu"))


def kv_of(tokens: list[int]) -> torch.Tensor:
    """Return a KV tensor whose values are the `tokens`."""
    return torch.tensor(tokens, dtype=torch.float32)[None, None, :, None].expand(2, 1, -1, 2).contiguous()


def test_the_longest_shared_beginning_is_found() -> None:
    cache = PrefixCache(2**20)
    cache.add([*range(100)], kv_of([*range(100)]))
    cache.add([*range(50), 7, 7, *range(52, 90)], kv_of([*range(50), 7, 7, *range(52, 90)]))
    entry, shared = cache.find_longest([*range(50), 7, 7, *range(52, 70), 3])
    assert entry is not None
    assert shared == 70
    assert entry.kv[0, 0, 50, 0] == 7
    assert cache.find_longest([*range(70), 9])[1] == 70
    assert cache.find_longest([*range(BLOCK - 1), 999])[1] == 0, "less than a block is not worth an index"
    assert cache.find_longest([5, *range(80)]) == (None, 0)


def test_a_hash_collision_is_no_match() -> None:
    """In CPython hash(-1) == hash(-2), so the cache must also compare the tokens."""
    cache = PrefixCache(2**20)
    cache.add([-1] * 40, kv_of([-1] * 40))
    assert cache.find_longest([-2] * 40) == (None, 0)
    assert cache.find_longest([-1] * 20)[1] == 20


def test_memory_is_bounded_and_the_least_recently_used_goes() -> None:
    kv = kv_of([*range(64)])
    cache = PrefixCache(3 * kv.numel() * 4)
    prompts = [[salt, *range(63)] for salt in range(1000, 1004)]
    for prompt in prompts[:3]:
        cache.add(prompt, kv)
    cache.find_longest(prompts[0])
    cache.add(prompts[3], kv)
    assert [cache.find_longest(prompt)[1] for prompt in prompts] == [64, 0, 64, 64]
    assert cache.bytes == 3 * kv.numel() * 4
    PrefixCache(10).add(prompts[0], kv)  # larger than all of it: not kept, no error


def test_a_tenant_with_many_prompts_displaces_none_of_another() -> None:
    kv = kv_of([*range(64)])
    cache = PrefixCache(3 * kv.numel() * 4)
    cache.add([*range(64)], kv, "modest")
    for number in range(1000, 1010):
        cache.add([number, *range(63)], kv, "greedy")
    assert cache.find_longest([*range(64)], "modest")[1] == 64
    assert [cache.find_longest([number, *range(63)], "greedy")[1] for number in (1007, 1008, 1009)] == [0, 64, 64]


def test_what_is_discarded_leaves_nothing_behind() -> None:
    cache = PrefixCache(2**20)
    cache.add([*range(64)], kv_of([*range(64)]))
    entry, _ = cache.find_longest([*range(64)])
    assert entry is not None
    cache.discard(entry)
    cache.discard(entry)
    assert (cache.bytes, cache._index) == (0, {})


def test_against_a_plain_search() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    cache = PrefixCache(2**30)
    cached: list[list[int]] = []
    for _ in range(120):
        base = dice.choice(cached)[: dice.randint(0, 120)] if cached and dice.random() < 0.7 else []
        tokens = base + [dice.randrange(3) for _ in range(dice.randint(0, 60))]
        best = max((_shared(other, tokens) for other in cached), default=0)
        shared = cache.find_longest(tokens)[1]
        assert best - BLOCK < shared <= best
        if len(tokens) >= BLOCK:
            cache.add(tokens, kv_of(tokens))
            cached.append(tokens)


def _shared(left: list[int], right: list[int]) -> int:
    count = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        count += 1
    return count


def test_kv_grows_within_its_budget_and_keeps_what_it_holds() -> None:
    kv = KV(SHAPE, bytes_max=1000 * SHAPE.token_bytes)
    assert kv.length_max == 1000
    assert kv.reserve(1, 40)
    kv.restore(0, kv_of([*range(40)]))
    assert kv.reserve(5, 100)
    assert kv.rows * kv.length <= 1000
    assert kv.snapshot(0, 40)[0, 0, :, 0].tolist() == [*range(40)]
    assert kv.reserve(1, 1000), "one sequence may have it all"
    assert kv.snapshot(0, 40)[1, 0, :, 1].tolist() == [*range(40)]
    assert not kv.reserve(2, 501)
    assert not kv.reserve(1, 1001)
    assert kv.reserve(10, 100), "and give it back"


def test_kv_rows_move_and_swap() -> None:
    kv = KV(SHAPE, bytes_max=2**20)
    kv.reserve(3, 32)
    kv.restore(0, kv_of([1, 2, 3]))
    kv.restore(1, kv_of([4, 5]))
    kv.swap(0, 1, 3)
    assert kv.snapshot(0, 2)[0, 0, :, 0].tolist() == [4, 5]
    kv.move(1, 2, 3)
    assert kv.snapshot(2, 3)[0, 0, :, 0].tolist() == [1, 2, 3]


def test_prefixes_are_found_by_blocks_of_sixteen_tokens() -> None:
    cache = PrefixCache(2**20)
    assert cache.find_longest([*range(64)]) == (None, 0)
    cache.add([*range(15)], kv_of([*range(15)]))
    assert cache.bytes == 0, "too short to be found again"
    cache.add([*range(64)], kv_of([*range(64)]))
    assert [cache.find_longest([*range(count), 999, 999])[1] for count in (15, 16, 17, 33)] == [0, 16, 17, 33]
    assert cache.find_longest([*range(16)])[1] == 16


def test_an_entry_as_large_as_the_cache_is_kept() -> None:
    kv = kv_of([*range(64)])
    cache = PrefixCache(kv.numel() * 4)
    cache.add([*range(64)], kv)
    assert cache.find_longest([*range(64)])[1] == 64


def test_kv_takes_no_more_than_it_needs_and_grows_by_doubling() -> None:
    shape = KVShape(layers=2, heads=3, size=5, dtype=torch.float16, device=torch.device("cpu"))
    assert shape.token_bytes == 120, "a key and a value of 5 numbers of 2 bytes, for 3 heads in 2 layers"
    kv = KV(shape, bytes_max=1000 * 120)
    assert (kv.rows, kv.length, kv.bytes) == (0, 0, 0)
    sizes = []
    for rows, length in ((1, 40), (1, 64), (1, 65), (1, 129), (2, 256), (3, 256), (2, 400), (4, 60)):
        assert kv.reserve(rows, length)
        sizes.append((kv.rows, kv.length))
        assert kv.bytes == kv.rows * kv.length * 120
    assert sizes == [(1, 64), (1, 64), (1, 128), (1, 256), (2, 256), (3, 333), (2, 500), (4, 250)]
    assert not kv.reserve(4, 251), "what does not fit changes nothing"
    assert (kv.rows, kv.length) == (4, 250)
    kv.release()
    assert (kv.rows, kv.length) == (0, 0)


def test_kv_doubles_the_direction_that_is_short_alone() -> None:
    kv = KV(SHAPE, bytes_max=2**20)
    sizes = []
    for rows, length in ((2, 100), (3, 100), (3, 129), (9, 10)):
        assert kv.reserve(rows, length)
        sizes.append((kv.rows, kv.length))
    assert sizes == [(2, 128), (4, 128), (4, 256), (9, 256)]


def test_kv_that_has_room_is_left_where_it_is() -> None:
    kv = KV(SHAPE, bytes_max=2**20)
    kv.reserve(4, 64)
    rows = kv.view(1, 2)
    assert kv.reserve(4, 64)
    rows[:] = 7.0
    assert [kv.snapshot(row, 64).sum() for row in range(4)] == [0, 7 * 256, 7 * 256, 0]


def test_kv_keeps_every_row_when_it_grows_and_restores_no_more_than_asked() -> None:
    kv = KV(SHAPE, bytes_max=2**20)
    kv.reserve(3, 32)
    for row in range(3):
        kv.restore(row, kv_of([row + 1, row + 2, row + 3]), row + 1)
    kv.reserve(4, 64)
    spelled = [kv.snapshot(row, 3)[0, 0, :, 0].tolist() for row in range(4)]
    assert spelled == [[1, 0, 0], [2, 3, 0], [3, 4, 5], [0, 0, 0]]


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
        owner=object(), choice=0, tokens=prompt, prompt_length=length, limit=length + tokens, sampling=Sampling(),
        seed=7, stream=True, salt=tenant, session=session, background=background,
    )  # fmt: skip


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
    assert fairness.select_joining([sequence("a")], running) == 0
    assert fairness.select_joining([sequence("b"), sequence("a")], running) == 1
    assert fairness.select_joining([sequence("b"), sequence("a"), sequence("c")], running) == 2
    assert fairness.select_joining([sequence("c", background=True), sequence("b")], running) == 1


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
        paused = shares.paused_flows(batch)
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
            while opened.is_busy:
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
