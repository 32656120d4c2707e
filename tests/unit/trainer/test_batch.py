"""P2 and P9: the batch holds exactly the sampled tokens, and the same stream makes the same bytes."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from headrace_schemas import Branch, Span
from headrace_trainer.batches.batch import Batch, Row, pack
from tests.support.seeds import draw_seed
from tests.unit.trainer.world import experience

V, W = "m@000000000000", "m@111111111111"


def two_spans() -> Row:
    branch = Branch(
        token_ids=(7, 8, 9, 10, 11, 12, 13),
        spans=(
            Span(start=2, logprobs=(-1.0, -2.0), turn_id="a", version=V, temperature=0.5),
            Span(start=6, logprobs=(-3.0,), turn_id="b", version=W, temperature=1.5),
        ),
    )
    return Row.of(experience(1, V).model_copy(update={"branch": branch}), 0.25, W)


def test_p2_ids_and_logprobs_are_the_sampled_ones_bit_for_bit() -> None:
    event = experience(3, V)
    row = Row.of(event, 1.0, V)
    assert event.branch is not None
    assert row.token_ids_T.tolist() == list(event.branch.token_ids)
    span = event.branch.spans[0]
    assert row.behaviour_T[span.start : span.stop].tobytes() == np.array(span.logprobs, np.float32).tobytes()


def test_pitfall_8_only_spans_are_trained() -> None:
    row = two_spans()
    assert row.loss_mask_T.tolist() == [False, False, True, True, False, False, True]
    assert row.temperature_T.tolist() == [1.0, 1.0, 0.5, 0.5, 1.0, 1.0, 1.5], "each span has its own"
    assert row.behaviour_T.tolist() == [0.0, 0.0, -1.0, -2.0, 0.0, 0.0, -3.0]
    assert row.fresh_T.tolist() == [False] * 6 + [True], "sampled by the version that the weights equal"
    assert Batch((row, row)).loss_tokens == 6


def test_p9_equal_rows_have_equal_digests() -> None:
    rows = [Row.of(experience(n, V), n / 3, V) for n in range(3)]
    again = [Row.of(experience(n, V), n / 3, None) for n in range(3)]
    assert Batch(tuple(rows)).digest() == Batch(tuple(again)).digest()
    pinned = "7100101ad679"
    assert Batch(tuple(rows)).digest().startswith(pinned), "batches of old releases can no longer be compared"


@pytest.mark.parametrize(
    "change",
    [{"token_ids_T": 0}, {"loss_mask_T": 6}, {"behaviour_T": 6}, {"temperature_T": 6}, {"advantage": None}],
    ids=lambda change: next(iter(change)),
)
def test_p9_the_digest_sees_every_field(change: dict[str, Any]) -> None:
    row = Row.of(experience(1, V), 1.0, V)
    ((name, element),) = change.items()
    value = getattr(row, name)
    if element is None:
        other: Any = np.float32(1.0000001)
    else:
        other = value.copy()
        other[element] = not other[element] if other.dtype == np.bool_ else other[element] + 1
    changed = Row(**{**row.__dict__, name: other})
    assert Batch((row,)).digest() != Batch((changed,)).digest()


def test_p9_the_digest_sees_the_order() -> None:
    a, b = (Row.of(experience(n, V), 1.0, V) for n in (1, 2))
    assert Batch((a, b)).digest() != Batch((b, a)).digest()


def test_packs_hold_every_row_once_within_the_budget() -> None:
    seed = draw_seed()
    draw = random.Random(seed)
    lengths = [draw.randint(1, 40) for _ in range(60)]
    packs = pack(lengths, 64)
    assert sorted(index for rows in packs for index in rows) == list(range(60))
    assert all(sum(lengths[index] for index in rows) <= 64 for rows in packs)
    assert len(packs) <= 1.3 * sum(lengths) / 64 + 1
    assert pack(lengths, 64) == packs


def test_a_row_longer_than_the_budget_runs_alone() -> None:
    assert pack([5, 100, 5], 10) == [[1], [0, 2]]
