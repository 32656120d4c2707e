"""Tests of batches that Trinity trains: valid by its own rule, and in the lineage exactly once, whoever dies.

The oracles are an undisturbed run and the weights: the stand-in records the trained batches in its checkpoint.
"""

from __future__ import annotations

import json
import sqlite3
import struct
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_runtime.errors import SettingError
from headrace_runtime.settings.sections import complete
from headrace_trainer.backends import BACKENDS
from headrace_trainer.batches.batch import Batch, Row
from headrace_trainer.experiences.restrictions import TokenSets
from headrace_trainer.learner import Learner
from headrace_trainer.lineage.store import LineageStore
from headrace_trainer.settings import TrainerSettings
from headrace_trainer.trinity_learner.disk import Disk
from headrace_trainer.trinity_learner.learner import JobFailed, TrinityLearner
from headrace_trainer.trinity_learner.rows import Buffer, TrinityRow, is_finite, rows_of
from tests.contract.learner.promises import GOING_ON, PROMISES, Opener, Promise, batch
from tests.trinity import stand_in
from tests.trinity.stand_in import parsed
from tests.unit.trainer.conftest import SMALL
from tests.unit.trainer.test_crash import Died, Fuse, result
from tests.unit.trainer.world import World, decision, experience

COMMAND = [sys.executable, stand_in.__file__, "--config"]
_STEPS = 3
VERSION = "m@0123456789abcdef"


@pytest.fixture
def learners(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[TrinityLearner]]:
    """Yield a list of learners, which are closed after the test.

    A trainer that dies here leaves its Trinity process running, as a killed trainer may.
    """
    opened: list[TrinityLearner] = []
    was = TrinityLearner.__init__

    def remember(self: TrinityLearner, *arguments: Any) -> None:
        was(self, *arguments)
        opened.append(self)

    monkeypatch.setattr(TrinityLearner, "__init__", remember)
    yield opened
    for opened_learner in opened:
        opened_learner.close()


def settings_of(base: Path, folder: Path, **more: Any) -> TrainerSettings:
    table: dict[str, Any] = {
        "base": str(base),
        "backend": "trinity",
        "trinity": {
            "folder": str(folder),
            "command": COMMAND,
            "environment": ["STAND_IN_DIES", "STAND_IN_DIED"],
            "step_timeout_s": 60,
        },
    }
    return complete(TrainerSettings).model_validate({**SMALL, **table, **more})


@pytest.mark.own_target
@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.__name__)
def test_it_keeps_what_every_learner_promises(
    promise: Promise, base: Path, tmp_path: Path, learners: list[TrinityLearner]
) -> None:
    def open_one(lineage: str) -> Learner:
        return BACKENDS.get("trinity").open(base, settings_of(base, tmp_path / "shared", lineage=lineage))

    (folder := tmp_path / "files").mkdir()
    promise(Opener(base, open_one), folder)


def story(world: World, version: str) -> None:
    events = [experience(n, version, reward=(n * 7) % 3, task=f"t{n % 2}") for n in range(11)]
    world.bus.produce(*events[:6], events[2], events[3], *events[6:])
    world.bus.produce(experience(1, version, reward=-1.0, revision=1), experience(12, version, reward=None))


async def train_with_crash(folder: Path, settings: TrainerSettings, fuse: Fuse) -> tuple[World, list[Any]]:
    """Train a lineage on the experiences of `story`, with a crash at the fuse's point and a new process after it."""
    world = World(folder)
    trainer = await _survive(world, settings, fuse)
    assert trainer.lineage is not None
    story(world, trainer.lineage.saved.versions[0].version)
    await _survive(world, settings, fuse)
    return world, lessons(world, Path(settings.of("trinity").folder) / "main")  # type: ignore[attr-defined]


async def _survive(world: World, settings: TrainerSettings, fuse: Fuse) -> Any:
    try:
        return await world.run(settings)
    except Died:
        fuse.at = None
        return await world.run(settings)


def lessons(world: World, folder: Path) -> list[Any]:
    """Return the batches that the lineage's weights contain, from the checkpoint that they were loaded from."""
    store = LineageStore(world.blobs, "main")
    reply = store.read()
    assert reply is not None
    about = json.loads(store.get(reply.present.optimizer).splitlines()[1])
    (path,) = (folder / "kept" / about["weights"]).glob("global_step_*/actor/optimizer.json")
    return list(json.loads(path.read_text())["lessons"])


def fragile(fuse: Fuse, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the process die before or after the durable change that the fuse selects."""

    def burning(owner: Any, name: str) -> None:
        was: Callable[..., Any] = getattr(owner, name)

        def burn(*arguments: Any, **more: Any) -> Any:
            fuse()
            result = was(*arguments, **more)
            fuse()
            return result

        monkeypatch.setattr(owner, name, burn)

    for name in ("set_pending", "put_model", "keep", "begin", "sweep"):
        burning(Disk, name)
    burning(Buffer, "hand_over")
    for name in ("_wait_for_step", "freeze"):
        burning(TrinityLearner, name)


async def _calm(folder: Path, base: Path) -> tuple[dict[str, Any], list[Any]]:
    world, trained = await train_with_crash(folder, settings_of(base, folder / "trinity"), Fuse(None))
    assert len(trained) == _STEPS == len(set(trained))
    return result(world), trained


@pytest.mark.timeout(900)
@pytest.mark.parametrize("stride", [pytest.param(1, marks=[pytest.mark.own_target, pytest.mark.timeout(3000)]), 29])
async def test_a_trainer_that_dies_anywhere_trains_each_batch_once(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, learners: list[TrinityLearner], stride: int
) -> None:
    fuse = Fuse(None)
    fragile(fuse, monkeypatch)
    expected, trained = await _calm(tmp_path / "calm", base)
    points = fuse.points
    assert points > 40
    for at in range(1, points + 1, stride):
        fuse.at, fuse.points = at, 0
        folder = tmp_path / str(at)
        fuse_world = settings_of(base, folder / "trinity")
        world = World(folder)
        trainer = await _survive(world, fuse_world, fuse)
        assert trainer.lineage is not None
        story(world, trainer.lineage.saved.versions[0].version)
        await _survive(world, fuse_world, fuse)
        fuse.at = None
        assert result(world) == expected, f"died at point {at}"
        assert lessons(world, folder / "trinity" / "main") == trained, f"died at point {at}"


@pytest.mark.parametrize("point", stand_in.POINTS)
@pytest.mark.long
async def test_a_trinity_that_dies_anywhere_trains_each_batch_once(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, learners: list[TrinityLearner], point: str
) -> None:
    expected, trained = await _calm(tmp_path / "calm", base)
    monkeypatch.setenv("STAND_IN_DIES", point)
    monkeypatch.setenv("STAND_IN_DIED", str(tmp_path / "died"))
    world, trained_batches = await train_with_crash(
        tmp_path / "other", settings_of(base, tmp_path / "other" / "trinity"), Fuse(None)
    )
    assert (tmp_path / "died").exists(), "nothing died"
    assert result(world) == expected
    assert trained_batches == trained


def test_a_finished_step_is_taken_over_and_not_taken_again(
    base: Path, tmp_path: Path, learners: list[TrinityLearner]
) -> None:
    settings = settings_of(base, tmp_path)
    trinity_learner = TrinityLearner.open(base, settings)
    before = trinity_learner.freeze()
    trinity_learner.step(batch(0), GOING_ON)
    after = trinity_learner.freeze()
    later = TrinityLearner.open(base, settings)
    later.thaw(before, with_random=True)
    later.step(batch(0), GOING_ON)
    assert later._running is None, "Trinity was not started for it"
    assert later.freeze() == after
    other = TrinityLearner.open(base, settings)
    other.thaw(before, with_random=True)
    other.step(batch(10), GOING_ON)
    assert other._running is not None, "another batch is another step"
    assert other.freeze() != after


def test_a_trinity_that_takes_no_step_changes_nothing_and_its_log_is_bounded(
    base: Path, tmp_path: Path, learners: list[TrinityLearner], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace_trainer.trinity_learner.learner._LOG_BYTES_MAX", 4096)
    words = [sys.executable, "-c", "print('much output ' * 200_000, 'no GPU here')"]
    table = {"folder": str(tmp_path), "command": words}
    trinity_learner = TrinityLearner.open(base, settings_of(base, tmp_path, trinity=table))
    before = trinity_learner.freeze()
    with pytest.raises(JobFailed, match=r"without its step[\s\S]*no GPU here"):
        trinity_learner.step(batch(0), GOING_ON)
    assert (trinity_learner.failure, trinity_learner.freeze()) == (None, before)
    assert [log.stat().st_size <= 4096 for log in tmp_path.rglob("*.log")] == [True]


def test_where_the_optimizer_is_gone_the_weights_are_not(
    base: Path, tmp_path: Path, learners: list[TrinityLearner]
) -> None:
    trinity_learner = TrinityLearner.open(base, settings_of(base, tmp_path / "one"))
    trinity_learner.step(batch(0), GOING_ON)
    frozen = trinity_learner.freeze()
    elsewhere = TrinityLearner.open(base, settings_of(base, tmp_path / "two"))
    elsewhere.thaw(frozen, with_random=True)
    assert elsewhere.freeze().weights == frozen.weights
    elsewhere.step(batch(10), GOING_ON)
    assert elsewhere.freeze().weights != frozen.weights


async def test_the_registry_may_send_it_back(base: Path, tmp_path: Path, learners: list[TrinityLearner]) -> None:
    settings = settings_of(base, tmp_path / "trinity", max_staleness=20)
    world = World(tmp_path)
    await world.run(settings)
    first = world.bus.checkpoints[0].version
    world.bus.produce(*(experience(n, first, reward=n % 3, task="t") for n in range(8)))
    await world.run(settings)
    world.bus.produce(decision(world.bus.checkpoints[1].version, "rejected", previous=first))
    world.bus.produce(*(experience(n, first, reward=n % 3, task="t") for n in range(20, 24)))
    await world.run(settings)
    fates = world.bus.fates
    assert set(fates.values()) == {"trained"}
    assert len(fates) == 12


@pytest.mark.parametrize(
    ("more", "name"),
    [
        ({"trinity": {"folder": ""}}, "trainer.trinity.folder"),
        ({"optimizer": {"kind": "muon"}}, "trainer.optimizer.kind"),
        ({"loss": {"updates_per_step": 2}}, "trainer.loss.updates_per_step"),
        ({"lora": {"rank": 4}}, "trainer.lora.rank"),
        ({"loss": {"kl": 0.1}}, "trainer.backend"),
    ],
)
def test_what_it_would_do_otherwise_is_refused_by_name(
    base: Path, tmp_path: Path, more: dict[str, Any], name: str
) -> None:
    with pytest.raises(SettingError) as refused:
        BACKENDS.get("trinity").open(base, settings_of(base, tmp_path, **more))
    assert refused.value.name == name


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
        expected_gradient = float(row.advantage) * batch.with_token_weight(row).token_weight
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
