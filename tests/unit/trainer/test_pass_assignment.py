"""The assignment of passes to ranks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_trainer.batches.batch import pack
from headrace_trainer.ray_learner.pass_assignment import budget, deal

LENGTHS = st.lists(st.integers(1, 60), max_size=24)


def test_the_longest_goes_first_and_to_whoever_has_least() -> None:
    assert deal([[0], [1], [2], [3]], [5, 9, 4, 1], 2) == [[1, 3], [0, 2]]


def test_equal_passes_go_in_turn() -> None:
    assert deal([[0], [1], [2]], [7, 7, 7], 2) == [[0, 2], [1]]


def test_nothing_is_dealt_to_everybody() -> None:
    assert deal([], [], 3) == [[], [], []]


@given(LENGTHS, st.integers(1, 5), st.integers(1, 80))
def test_each_row_is_trained_once_whoever_it_goes_to(lengths: list[int], ranks: int, pack_tokens: int) -> None:
    packs = pack(lengths, budget(lengths, pack_tokens, ranks))
    hands = deal(packs, lengths, ranks)
    assert len(hands) == ranks
    assert sorted(row for hand in hands for number in hand for row in packs[number]) == list(range(len(lengths)))


@given(LENGTHS, st.integers(1, 5), st.integers(1, 80))
def test_a_pass_that_holds_several_rows_stays_within_both_bounds(
    lengths: list[int], ranks: int, pack_tokens: int
) -> None:
    bound = budget(lengths, pack_tokens, ranks)
    assert 1 <= bound <= pack_tokens
    for rows in pack(lengths, bound):
        assert len(rows) == 1 or sum(lengths[row] for row in rows) <= bound


@pytest.mark.parametrize(("ranks", "passes"), [(1, 1), (2, 2), (4, 4)])
def test_a_small_batch_has_a_pass_for_each_rank(ranks: int, passes: int) -> None:
    lengths = [10] * 8
    packs = pack(lengths, budget(lengths, 4096, ranks))
    assert len(packs) == passes
    assert [len(hand) for hand in deal(packs, lengths, ranks)] == [1] * ranks
