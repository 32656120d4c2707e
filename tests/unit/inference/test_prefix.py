"""Tests of the KV cache of prompt prefixes: lookup by tokens, and bounded memory."""

from __future__ import annotations

import random

import torch

from headrace_inference.torch_engine.kv import BLOCK, KV, KVShape, PrefixCache

SHAPE = KVShape(layers=1, heads=1, size=2, dtype=torch.float32, device=torch.device("cpu"))


def kv_of(tokens: list[int]) -> torch.Tensor:
    """Return a KV tensor whose values are the `tokens`."""
    return torch.tensor(tokens, dtype=torch.float32)[None, None, :, None].expand(2, 1, -1, 2).contiguous()


def test_the_longest_shared_beginning_is_found() -> None:
    cache = PrefixCache(2**20)
    cache.add([*range(100)], kv_of([*range(100)]))
    cache.add([*range(50), 7, 7, *range(52, 90)], kv_of([*range(50), 7, 7, *range(52, 90)]))
    entry, shared = cache.longest([*range(50), 7, 7, *range(52, 70), 3])
    assert entry is not None
    assert shared == 70
    assert entry.kv[0, 0, 50, 0] == 7
    assert cache.longest([*range(70), 9])[1] == 70
    assert cache.longest([*range(BLOCK - 1), 999])[1] == 0, "less than a block is not worth an index"
    assert cache.longest([5, *range(80)]) == (None, 0)


def test_a_hash_collision_is_no_match() -> None:
    """In CPython hash(-1) == hash(-2), so the cache must also compare the tokens."""
    cache = PrefixCache(2**20)
    cache.add([-1] * 40, kv_of([-1] * 40))
    assert cache.longest([-2] * 40) == (None, 0)
    assert cache.longest([-1] * 20)[1] == 20


def test_memory_is_bounded_and_the_least_recently_used_goes() -> None:
    kv = kv_of([*range(64)])
    cache = PrefixCache(3 * kv.numel() * 4)
    prompts = [[salt, *range(63)] for salt in range(1000, 1004)]
    for prompt in prompts[:3]:
        cache.add(prompt, kv)
    cache.longest(prompts[0])
    cache.add(prompts[3], kv)
    assert [cache.longest(prompt)[1] for prompt in prompts] == [64, 0, 64, 64]
    assert cache.bytes == 3 * kv.numel() * 4
    PrefixCache(10).add(prompts[0], kv)  # larger than all of it: not kept, no error


def test_a_tenant_with_many_prompts_displaces_none_of_another() -> None:
    kv = kv_of([*range(64)])
    cache = PrefixCache(3 * kv.numel() * 4)
    cache.add([*range(64)], kv, "modest")
    for number in range(1000, 1010):
        cache.add([number, *range(63)], kv, "greedy")
    assert cache.longest([*range(64)], "modest")[1] == 64
    assert [cache.longest([number, *range(63)], "greedy")[1] for number in (1007, 1008, 1009)] == [0, 64, 64]


def test_what_is_discarded_leaves_nothing_behind() -> None:
    cache = PrefixCache(2**20)
    cache.add([*range(64)], kv_of([*range(64)]))
    entry, _ = cache.longest([*range(64)])
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
        shared = cache.longest(tokens)[1]
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
    assert cache.longest([*range(64)]) == (None, 0)
    cache.add([*range(15)], kv_of([*range(15)]))
    assert cache.bytes == 0, "too short to be found again"
    cache.add([*range(64)], kv_of([*range(64)]))
    assert [cache.longest([*range(count), 999, 999])[1] for count in (15, 16, 17, 33)] == [0, 16, 17, 33]
    assert cache.longest([*range(16)])[1] == 16


def test_an_entry_as_large_as_the_cache_is_kept() -> None:
    kv = kv_of([*range(64)])
    cache = PrefixCache(kv.numel() * 4)
    cache.add([*range(64)], kv)
    assert cache.longest([*range(64)])[1] == 64


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
