"""Tests of batches in Trinity's format: valid by its own rule, with every token and the weight of each token."""

from __future__ import annotations

import sqlite3
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_trainer.batches.batch import Batch, Row
from headrace_trainer.experiences.token_sets import TokenSets
from headrace_trainer.trinity_learner.rows import Buffer, TrinityRow, is_finite, rows_of
from tests.trinity.stand_in import parsed
from tests.unit.trainer.world import experience

VERSION = "m@0123456789abcdef"


def row(number: int, advantage: float, weight: float | None = None, **more: Any) -> Row:
    return Row.of(experience(number, VERSION, **more), advantage, VERSION, weight)


def read(handed: TrinityRow) -> dict[str, Any]:
    return parsed(handed.experience_bytes)


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    rows = []
    for number in range(draw(st.integers(1, 5))):
        weight = draw(st.none() | st.floats(1e-4, 1.0))
        spans = draw(st.integers(1, 3))
        length = draw(st.integers(12, 40))
        rows.append(
            row(
                number,
                draw(st.floats(-5, 5)),
                weight,
                length=length,
                prompt=draw(st.integers(1, 6)),
                versions=[VERSION] * spans,
            )
        )
    return Batch(tuple(rows), full_rows=draw(st.integers(5, 9)))


@given(batches(), st.integers(0, 3))
def test_every_token_mask_and_logprob_arrives_as_it_was_sampled(batch: Batch, idle: int) -> None:
    handed, out = rows_of(batch, 1.0, len(batch.rows) + idle, 7)
    assert not out
    assert len(handed) == len(batch.rows) + idle
    for row, sent in zip(batch.rows, handed, strict=False):
        reply = read(sent)
        tensors, prompt = reply["tensors"], reply["prompt_length"]
        assert tensors["tokens"].tobytes() == row.token_ids_T.astype("<i4").tobytes()
        assert not row.loss_mask_T[:prompt].any()
        assert tensors["action_mask"].tobytes() == row.loss_mask_T[prompt:].tobytes()
        assert tensors["logprobs"].tobytes() == row.behaviour_T[prompt:].astype("<f4").tobytes()
        assert len(tensors["advantages"]) == len(tensors["returns"]) == len(row.token_ids_T) - prompt
        assert reply["info"] == {"model_version": 7}
        assert reply["eid"]["task"] == row.experience_id


@given(batches(), st.integers(0, 3))
def test_a_mean_over_trinitys_tokens_weighs_each_as_we_do(batch: Batch, idle: int) -> None:
    """By definition, the gradient of a token is its row's weight times the advantage."""
    handed, _ = rows_of(batch, 1.0, len(batch.rows) + idle, 0)
    tokens = sum(int(read(trinity_row)["tensors"]["action_mask"].sum()) for trinity_row in handed)
    for row, sent in zip(batch.rows, handed, strict=False):
        advantages = read(sent)["tensors"]["advantages"]
        expected_gradient = float(row.advantage) * batch.weighted(row).token_weight
        trained = row.loss_mask_T[read(sent)["prompt_length"] :]
        assert advantages[trained] / tokens == pytest.approx(
            np.full(trained.sum(), expected_gradient), rel=1e-5, abs=1e-9
        )
        assert not advantages[~trained].any()
    for sent in handed[len(batch.rows) :]:
        assert not read(sent)["tensors"]["advantages"].any(), "what fills a batch up teaches nothing"


def test_a_batch_by_hand() -> None:
    """Two rows of two trained tokens and one padding row: the weight 1/4 of each token becomes 5/4 of five tokens."""
    batch = Batch((row(0, 2.0, length=4, prompt=2), row(1, -1.0, length=4, prompt=2)))
    handed, _ = rows_of(batch, 1.0, 3, 0)
    assert [read(trinity_row)["tensors"]["advantages"].tolist() for trinity_row in handed] == [
        [2.5, 2.5],
        [-1.25, -1.25],
        [0.0],
    ]


def test_what_was_sampled_at_another_temperature_has_no_part() -> None:
    batch = Batch((row(0, 1.0), row(1, 1.0, temperature=0.7)))
    handed, out = rows_of(batch, 1.0, 2, 0)
    assert out == {"e1"}
    assert [trinity_row.task_id for trinity_row in handed] == ["e0", "headrace-idle"]
    assert rows_of(batch, 1.3, 2, 0)[0] == []


def test_names_fit_trinitys_columns() -> None:
    long = experience(0, VERSION).model_copy(update={"experience_id": "e" * 300})
    (handed,), _ = rows_of(Batch((Row.of(long, 1.0, None),)), 1.0, 1, 0)
    assert len(handed.task_id) == 64
    assert len(handed.msg_id) <= 64


def test_what_is_not_finite_is_seen_before_it_is_handed_over() -> None:
    assert is_finite(Batch((row(0, 1.0),)))
    assert not is_finite(Batch((row(0, float("nan")),)))


def test_the_tensors_are_a_safetensors_file_without_a_gap() -> None:
    (handed,), _ = rows_of(Batch((row(0, 1.0),)), 1.0, 1, 0)
    data = handed.experience_bytes
    _, meta, blob = struct.unpack("<BQQ", data[4:21])
    assert len(data) == 21 + meta + blob
    (header,) = struct.unpack("<Q", data[21 + meta : 29 + meta])
    assert header % 8 == 0, "numbers begin where their type wants them"


def test_a_batch_is_handed_over_whole_and_once(tmp_path: Path) -> None:
    buffer = Buffer(f"sqlite:///{tmp_path / 'b.db'}", "experiences_j1")
    rows, _ = rows_of(Batch((row(0, 1.0), row(1, -1.0))), 1.0, 3, 4)
    assert buffer.hand_over(rows)
    assert not buffer.hand_over(rows), "the second time nothing is done"
    with sqlite3.connect(tmp_path / "b.db") as connection:
        stored = connection.execute(
            "select m.task_id, m.run_id, m.msg_id, m.model_version, m.consumed, b.experience_bytes "
            "from experiences_j1 m join experiences_j1_blob b on b.id = m.id order by m.id"
        ).fetchall()
    assert stored == [(sent_row.task_id, 0, sent_row.msg_id, 4, 0, sent_row.experience_bytes) for sent_row in rows]


def test_a_hand_over_that_breaks_off_leaves_nothing(tmp_path: Path) -> None:
    buffer = Buffer(f"sqlite:///{tmp_path / 'b.db'}", "experiences_j1")
    rows, _ = rows_of(Batch((row(0, 1.0), row(1, -1.0))), 1.0, 2, 0)
    broken = TrinityRow(rows[1].task_id, rows[1].msg_id, 0, 0.0, None)  # type: ignore[arg-type]
    with pytest.raises(Exception, match="NOT NULL"):
        buffer.hand_over([rows[0], broken])
    assert buffer.hand_over(rows), "none of them was there"


def test_restricted_answers_are_left_out_by_name() -> None:
    sets = TokenSets(np.array([6], np.int32), (np.array([3], np.int32),))
    batch = Batch((row(0, 1.0), replace(row(1, 1.0), sets=sets)))
    rows, out = rows_of(batch, 1.0, 2, 0)
    assert len(rows) == 2
    assert out == {batch.rows[1].name}
