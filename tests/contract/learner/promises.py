"""Promises of `headrace_trainer.learner.Learner`, each as a function that fails for a learner that breaks it."""

from __future__ import annotations

import json
import math
import shutil
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from headrace_schemas.values.blobs import Fingerprint
from headrace_trainer.batches.batch import Batch, Row
from headrace_trainer.learner import (
    GRADIENT_FACTOR,
    MEASURED,
    OPTIMIZER,
    WEIGHTS,
    Abandoned,
    Copy,
    Frozen,
    Learner,
    NotFinite,
)
from headrace_trainer.learner import VERSION as FILES
from tests.unit.trainer.world import experience


@dataclass(frozen=True)
class Opener:
    """Factory of learners of one back end. A learner of a new lineage name is in the state of a new lineage."""

    base: Path
    open: Callable[[str], Learner]

    def __call__(self, lineage: str) -> Learner:
        return self.open(lineage)

    def version(self, written: Path, folder: Path) -> Path:
        """Return a complete version: the written files, and the base's other files."""
        shutil.copytree(written, folder)
        if not (folder / "adapter_config.json").exists():
            for path in self.base.iterdir():
                if path.suffix != ".safetensors":
                    shutil.copy(path, folder)
        return folder


Promise = Callable[[Opener, Path], None]
VERSION = "m@0123456789abcdef"
GOING_ON = threading.Event()
"""Stop flag that is never set."""


def row(number: int, advantage: float, token_weight: float | None = None) -> Row:
    """Return a trained row, which is a correction if it has a `token_weight`."""
    return Row.of(experience(number, VERSION), advantage, None, token_weight)


def batch(first: int, advantage: float | None = None) -> Batch:
    """Return a batch of three rows that is different for each `first`."""
    each = 1.0 + first / 8 if advantage is None else advantage
    return Batch((row(first, each), row(first + 1, -0.5), row(first + 2, 0.25)))


def without_advantages(first: int) -> Batch:
    return Batch(tuple(row(number, 0.0) for number in range(first, first + 3)))


def files(folder: Path) -> Mapping[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def new(folder: Path, name: str) -> Path:
    created = folder / name
    created.mkdir(parents=True)
    return created


def frozen(learner: Learner) -> Frozen:
    """Return all state that the learner would save."""
    with tempfile.TemporaryDirectory() as name:
        _written(learner.copy(None), Path(name))
        return Frozen((Path(name) / WEIGHTS).read_bytes(), (Path(name) / OPTIMIZER).read_bytes())


def thaw(learner: Learner, then: Frozen, *, with_random: bool) -> None:
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / WEIGHTS).write_bytes(then.weights)
        (Path(name) / OPTIMIZER).write_bytes(then.optimizer)
        learner.restore(Path(name), with_random=with_random)


def write(learner: Learner, folder: Path, base: str) -> Fingerprint:
    """Write the files of the present weights to `folder`, and return their fingerprint."""
    with tempfile.TemporaryDirectory() as name:
        copy = learner.copy(base)
        _written(copy, Path(name))
        shutil.copytree(Path(name) / FILES, folder, dirs_exist_ok=True)
    assert copy.fingerprint is not None
    return copy.fingerprint


def _written(copy: Copy, folder: Path) -> None:
    copy.write(folder)
    copy.drop()
    copy.drop()


def it_says_what_it_can_be_given(open_one: Opener, _: Path) -> None:
    learner = open_one("main")
    assert learner.abilities == open_one("main").abilities
    assert learner.abilities.vocabulary > 1
    assert learner.abilities.context > 1
    assert learner.sequence_bound() > 1
    assert learner.failure is None
    learner.step(batch(0), GOING_ON)
    assert learner.abilities == open_one("main").abilities, "and it stays so"


def a_step_changes_the_weights_and_is_measured(open_one: Opener, _: Path) -> None:
    learner, step_batch = open_one("main"), batch(0)
    before = frozen(learner)
    outcome = learner.step(step_batch, GOING_ON)
    assert set(MEASURED) <= outcome.measured.keys()
    assert all(math.isfinite(outcome.measured[name]) for name in MEASURED)
    assert outcome.measured[GRADIENT_FACTOR] > 0
    assert outcome.left_out <= {row.experience_id for row in step_batch.rows}
    after = frozen(learner)
    assert before.weights != after.weights
    assert before.optimizer != after.optimizer


def corrections_are_trained(open_one: Opener, _: Path) -> None:
    """A batch may consist of corrections alone, or of corrections and new rows."""
    alone, beside, without = open_one("main"), open_one("main"), open_one("main")
    before = frozen(alone)
    alone.step(Batch((row(7, 0.5, 0.01),)), GOING_ON)
    assert frozen(alone).weights != before.weights
    beside.step(Batch((*batch(0).rows, row(7, 0.5, 0.01))), GOING_ON)
    without.step(batch(0), GOING_ON)
    assert frozen(beside).weights != frozen(without).weights


def equal_calls_make_equal_weights(open_one: Opener, _: Path) -> None:
    ends = []
    for _turn in range(2):
        learner = open_one("main")
        for first in (0, 10):
            learner.step(batch(first), GOING_ON)
        ends.append(frozen(learner))
    assert ends[0] == ends[1]


def freezing_changes_nothing(open_one: Opener, _: Path) -> None:
    learner, other = open_one("main"), open_one("main")
    assert frozen(learner) == frozen(learner)
    for opened in (learner, other):
        opened.step(batch(0), GOING_ON)
    assert frozen(learner) == frozen(learner) == frozen(other)


def another_process_goes_on_as_if_nothing_had_happened(open_one: Opener, _: Path) -> None:
    learner, later = open_one("main"), open_one("main")
    learner.step(batch(0), GOING_ON)
    then = frozen(learner)
    learner.step(batch(10), GOING_ON)
    later.step(batch(20), GOING_ON)
    thaw(later, then, with_random=True)
    assert frozen(later) == then
    later.step(batch(10), GOING_ON)
    assert frozen(later) == frozen(learner)


def it_goes_back(open_one: Opener, _: Path) -> None:
    learner, other = open_one("main"), open_one("main")
    for opened in (learner, other):
        opened.step(batch(0), GOING_ON)
    then = frozen(learner)
    learner.step(batch(10), GOING_ON)
    thaw(learner, then, with_random=False)
    assert frozen(learner).weights == then.weights
    for opened in (learner, other):
        opened.step(batch(20), GOING_ON)
    assert frozen(learner).weights == frozen(other).weights, "the optimizer went back, too"


def a_copy_is_of_its_moment(open_one: Opener, folder: Path) -> None:
    """A copy has the weights of the time at which it was taken, however late it is written, also after a failed
    write."""
    learner = open_one("main")
    learner.step(batch(0), GOING_ON)
    then, answers = frozen(learner), write(learner, new(folder, "then"), VERSION)
    copy = learner.copy(VERSION)
    learner.step(batch(10), GOING_ON)
    for turn in ("first", "again"):
        target, at_weights = new(folder, turn), list[tuple[bytes, Mapping[str, bytes]]]()
        copy.write(target, partial(_read_weights, target, at_weights))
        assert at_weights == [(then.weights, files(folder / "then"))], "reported once, when they are complete"
        assert (folder / turn / WEIGHTS).read_bytes() == then.weights
        assert (folder / turn / OPTIMIZER).read_bytes() == then.optimizer
        assert files(folder / turn / FILES) == files(folder / "then")
    copy.drop()
    assert copy.fingerprint == answers
    assert frozen(learner).weights != then.weights, "and what was copied goes on"


def _read_weights(folder: Path, contents: list[tuple[bytes, Mapping[str, bytes]]]) -> None:
    contents.append(((folder / WEIGHTS).read_bytes(), files(folder / FILES)))


def lineages_share_no_blob(open_one: Opener, _: Path) -> None:
    first, second = frozen(open_one("a")), frozen(open_one("b"))
    assert not {first.weights, first.optimizer} & {second.weights, second.optimizer}
    assert first.weights != first.optimizer


def what_is_not_finite_changes_nothing(open_one: Opener, _: Path) -> None:
    learner, other = open_one("main"), open_one("main")
    for opened in (learner, other):
        opened.step(batch(0), GOING_ON)
    before = frozen(learner)
    with pytest.raises(NotFinite):
        learner.step(batch(10, math.nan), GOING_ON)
    assert frozen(learner) == before
    for opened in (learner, other):
        opened.step(batch(20), GOING_ON)
    assert frozen(learner) == frozen(other)


def a_step_reports_whether_it_moved_the_weights(open_one: Opener, _: Path) -> None:
    """The promise is checked first without momentum, and then with the momentum of a previous step."""
    learner = open_one("main")
    for step_batch in (without_advantages(90), batch(0), without_advantages(80), batch(10)):
        before = frozen(learner).weights
        moved = learner.step(step_batch, GOING_ON).moved
        assert moved == (frozen(learner).weights != before)
        assert moved or not any(row.has_advantage for row in step_batch.rows)


def a_step_that_is_told_to_stop_is_abandoned(open_one: Opener, _: Path) -> None:
    stop = threading.Event()
    stop.set()
    with pytest.raises(Abandoned):
        open_one("main").step(batch(0), stop)


def a_version_is_what_was_trained(open_one: Opener, folder: Path) -> None:
    learner, later = open_one("main"), open_one("main")
    learner.step(batch(0), GOING_ON)
    then = frozen(learner)
    answers = write(learner, new(folder, "ours"), VERSION)
    assert frozen(learner) == then, "writing changes nothing"
    assert write(learner, new(folder, "again"), VERSION) == answers
    assert files(folder / "again") == files(folder / "ours"), "equal weights, equal files"
    later.step(batch(10), GOING_ON)
    assert write(later, new(folder, "later"), VERSION) != answers, "other weights, other answers"
    assert files(folder / "later") != files(folder / "ours")
    later.load(open_one.version(folder / "ours", folder / "version"))
    assert frozen(later).weights == then.weights
    assert write(later, new(folder, "read"), VERSION) == answers
    assert files(folder / "read") == files(folder / "ours")


def a_version_holds_weights_alone(open_one: Opener, folder: Path) -> None:
    learner = open_one("main")
    learner.step(batch(0), GOING_ON)
    write(learner, folder, VERSION)
    written = files(folder)
    if learner.abilities.kind == "full":
        assert any(name.endswith(".safetensors") for name in written)
        assert all(name.endswith((".safetensors", ".safetensors.index.json")) for name in written)
    else:
        assert {"adapter_model.safetensors", "adapter_config.json"} <= written.keys()
        assert json.loads(written["adapter_config.json"])["base_model_name_or_path"] == VERSION
    assert not any(str(folder).encode() in content for content in written.values()), "and no path"


def loading_forgets_all_momentum(open_one: Opener, folder: Path) -> None:
    learner, other, fresh = open_one("main"), open_one("main"), open_one("main")
    learner.step(batch(0), GOING_ON)
    write(learner, new(folder, "written"), VERSION)
    version = open_one.version(folder / "written", folder / "version")
    for first in (10, 20):
        other.step(batch(first), GOING_ON)
    for opened in (other, fresh):
        opened.load(version)
    assert frozen(other) == frozen(fresh)


def the_base_answers_as_the_base(open_one: Opener, folder: Path) -> None:
    learner = open_one("main")
    answers = learner.fingerprint_of_base()
    assert len(answers.logprobs) == len(answers.token_ids) - 1
    assert answers == open_one("main").fingerprint_of_base()
    learner.step(batch(0), GOING_ON)
    assert write(learner, folder, VERSION) != answers, "and not as its child"


def it_may_be_closed_twice(open_one: Opener, _: Path) -> None:
    learner = open_one("main")
    learner.step(batch(0), GOING_ON)
    learner.close()
    learner.close()


PROMISES: tuple[Promise, ...] = (
    it_says_what_it_can_be_given,
    a_step_changes_the_weights_and_is_measured,
    corrections_are_trained,
    equal_calls_make_equal_weights,
    freezing_changes_nothing,
    another_process_goes_on_as_if_nothing_had_happened,
    it_goes_back,
    a_copy_is_of_its_moment,
    lineages_share_no_blob,
    what_is_not_finite_changes_nothing,
    a_step_reports_whether_it_moved_the_weights,
    a_step_that_is_told_to_stop_is_abandoned,
    a_version_is_what_was_trained,
    a_version_holds_weights_alone,
    loading_forgets_all_momentum,
    the_base_answers_as_the_base,
    it_may_be_closed_twice,
)
