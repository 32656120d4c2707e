"""Feedback of every kind in any order: the experiences are those of an oracle that hears it in order (P10)."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest

from tests.feedback.planted import FAULTS, TRAINING_FAULTS, Fault
from tests.feedback.playing import differing, replayed, talk
from tests.feedback.training import TRAINED
from tests.support.marks import postgres_is_long

COUNT = 200


@pytest.mark.parametrize(("seed", "combine"), [(1, "mean"), (2, "sum")])
@postgres_is_long()
async def test_any_order_ends_as_the_order_of_the_log(
    database_url: str, data_dir: Path, seed: int, combine: Literal["mean", "sum"]
) -> None:
    assert await differing(database_url, data_dir, seed, COUNT, combine) == []


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
@pytest.mark.long
async def test_a_planted_fault_is_noticed(data_dir: Path, fault: Fault) -> None:
    with fault.planted():
        assert await differing("sqlite", data_dir, 1, COUNT)


async def test_algorithms_train_the_last_word_however_answers_were_sampled(data_dir: Path) -> None:
    assert await differing("sqlite", data_dir, 4, COUNT, algorithms=TRAINED) == []


@pytest.mark.parametrize("fault", TRAINING_FAULTS, ids=lambda fault: fault.name)
@pytest.mark.long
async def test_a_planted_fault_of_training_is_noticed(data_dir: Path, fault: Fault) -> None:
    with fault.planted():
        assert await differing("sqlite", data_dir, 4, COUNT, algorithms=TRAINED)


async def test_p9_a_replay_ends_the_same() -> None:
    assert await replayed(3, 2_000) == []


def test_the_talk_has_everything() -> None:
    _, sayings = talk(0, 10_000)
    assert {saying.form for saying in sayings} == {
        "number", "thumb", "rating", "label", "parts", "edit", "preference", "facts",
    }  # fmt: skip
    assert {saying.where for saying in sayings} == {
        "session", "all turns", "some turns", "turns", "answer", "task", "pair",
    }  # fmt: skip
    assert 0.08 < sum(saying.withdrawn for saying in sayings) / len(sayings) < 0.12
    assert 0.9 < (max(saying.skew_s for saying in sayings) - min(saying.skew_s for saying in sayings)) / 7200 <= 1


@pytest.mark.own_target
@pytest.mark.timeout(1800)
async def test_ten_thousand_in_any_order(data_dir: Path) -> None:
    assert await differing("sqlite", data_dir, 7, 10_000) == []
