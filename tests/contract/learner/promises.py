"""What `headrace_trainer.learner.Learner` promises, each as a function that fails where a learner does not keep it."""

from __future__ import annotations

import json
import math
import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from headrace_trainer.batches.batch import Batch, Row
from headrace_trainer.learner import GRADIENT_FACTOR, MEASURED, Abandoned, Learner, NotFinite
from tests.unit.trainer.world import experience


@dataclass(frozen=True)
class Opener:
    """One back end. A learner of the named lineage is as a lineage begins."""

    base: Path
    open: Callable[[str], Learner]

    def __call__(self, lineage: str) -> Learner:
        return self.open(lineage)

    def version(self, written: Path, folder: Path) -> Path:
        """The whole version: what was written, and of all weights the base's other files."""
        shutil.copytree(written, folder)
        if not (folder / "adapter_config.json").exists():
            for path in self.base.iterdir():
                if path.suffix != ".safetensors":
                    shutil.copy(path, folder)
        return folder


Promise = Callable[[Opener, Path], None]
VERSION = "m@0123456789abcdef"
GOING_ON = threading.Event()
"""Nobody sets it."""


def row(number: int, advantage: float, token_weight: float | None = None) -> Row:
    """With a `token_weight` it is a correction."""
    return Row.of(experience(number, VERSION), advantage, None, token_weight)


def batch(first: int, advantage: float | None = None) -> Batch:
    """Three rows that no other `first` has, and that add up to something else."""
    each = 1.0 + first / 8 if advantage is None else advantage
    return Batch((row(first, each), row(first + 1, -0.5), row(first + 2, 0.25)))


def files(folder: Path) -> Mapping[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def new(folder: Path, name: str) -> Path:
    made = folder / name
    made.mkdir(parents=True)
    return made


def it_says_what_it_can_be_given(open_one: Opener, _: Path) -> None:
    ours = open_one("main")
    assert ours.abilities == open_one("main").abilities
    assert ours.abilities.vocabulary > 1
    assert ours.abilities.context > 1
    assert ours.sequence_bound() > 1
    assert ours.failure is None
    ours.step(batch(0), GOING_ON)
    assert ours.abilities == open_one("main").abilities, "and it stays so"


def a_step_changes_the_weights_and_is_measured(open_one: Opener, _: Path) -> None:
    ours, given = open_one("main"), batch(0)
    before = ours.freeze()
    taken = ours.step(given, GOING_ON)
    assert set(MEASURED) <= taken.measured.keys()
    assert all(math.isfinite(taken.measured[name]) for name in MEASURED)
    assert taken.measured[GRADIENT_FACTOR] > 0
    assert taken.left_out <= {one.experience_id for one in given.rows}
    after = ours.freeze()
    assert before.weights != after.weights
    assert before.optimizer != after.optimizer


def corrections_are_trained(open_one: Opener, _: Path) -> None:
    """Alone, and beside others."""
    alone, beside, without = open_one("main"), open_one("main"), open_one("main")
    before = alone.freeze()
    alone.step(Batch((row(7, 0.5, 0.01),)), GOING_ON)
    assert alone.freeze().weights != before.weights
    beside.step(Batch((*batch(0).rows, row(7, 0.5, 0.01))), GOING_ON)
    without.step(batch(0), GOING_ON)
    assert beside.freeze().weights != without.freeze().weights


def equal_calls_make_equal_weights(open_one: Opener, _: Path) -> None:
    ends = []
    for _turn in range(2):
        ours = open_one("main")
        for first in (0, 10):
            ours.step(batch(first), GOING_ON)
        ends.append(ours.freeze())
    assert ends[0] == ends[1]


def freezing_changes_nothing(open_one: Opener, _: Path) -> None:
    ours, other = open_one("main"), open_one("main")
    assert ours.freeze() == ours.freeze()
    for one in (ours, other):
        one.step(batch(0), GOING_ON)
    assert ours.freeze() == ours.freeze() == other.freeze()


def another_process_goes_on_as_if_nothing_had_happened(open_one: Opener, _: Path) -> None:
    ours, later = open_one("main"), open_one("main")
    ours.step(batch(0), GOING_ON)
    then = ours.freeze()
    ours.step(batch(10), GOING_ON)
    later.step(batch(20), GOING_ON)
    later.thaw(then, with_random=True)
    assert later.freeze() == then
    later.step(batch(10), GOING_ON)
    assert later.freeze() == ours.freeze()


def it_goes_back(open_one: Opener, _: Path) -> None:
    ours, other = open_one("main"), open_one("main")
    for one in (ours, other):
        one.step(batch(0), GOING_ON)
    then = ours.freeze()
    ours.step(batch(10), GOING_ON)
    ours.thaw(then, with_random=False)
    assert ours.freeze().weights == then.weights
    for one in (ours, other):
        one.step(batch(20), GOING_ON)
    assert ours.freeze().weights == other.freeze().weights, "the optimizer went back, too"


def lineages_share_no_blob(open_one: Opener, _: Path) -> None:
    ours, others = open_one("a").freeze(), open_one("b").freeze()
    assert not {ours.weights, ours.optimizer} & {others.weights, others.optimizer}
    assert ours.weights != ours.optimizer


def what_is_not_finite_changes_nothing(open_one: Opener, _: Path) -> None:
    ours, other = open_one("main"), open_one("main")
    for one in (ours, other):
        one.step(batch(0), GOING_ON)
    before = ours.freeze()
    with pytest.raises(NotFinite):
        ours.step(batch(10, math.nan), GOING_ON)
    assert ours.freeze() == before
    for one in (ours, other):
        one.step(batch(20), GOING_ON)
    assert ours.freeze() == other.freeze()


def a_step_that_is_told_to_stop_is_abandoned(open_one: Opener, _: Path) -> None:
    stop = threading.Event()
    stop.set()
    with pytest.raises(Abandoned):
        open_one("main").step(batch(0), stop)


def a_version_is_what_was_trained(open_one: Opener, folder: Path) -> None:
    ours, later = open_one("main"), open_one("main")
    ours.step(batch(0), GOING_ON)
    then = ours.freeze()
    answers = ours.write(new(folder, "ours"), VERSION)
    assert ours.freeze() == then, "writing changes nothing"
    assert ours.write(new(folder, "again"), VERSION) == answers
    assert files(folder / "again") == files(folder / "ours"), "equal weights, equal files"
    later.step(batch(10), GOING_ON)
    assert later.write(new(folder, "later"), VERSION) != answers, "other weights, other answers"
    assert files(folder / "later") != files(folder / "ours")
    later.load(open_one.version(folder / "ours", folder / "version"))
    assert later.freeze().weights == then.weights
    assert later.write(new(folder, "read"), VERSION) == answers
    assert files(folder / "read") == files(folder / "ours")


def a_version_holds_weights_alone(open_one: Opener, folder: Path) -> None:
    ours = open_one("main")
    ours.step(batch(0), GOING_ON)
    ours.write(folder, VERSION)
    written = files(folder)
    if ours.abilities.kind == "full":
        assert any(name.endswith(".safetensors") for name in written)
        assert all(name.endswith((".safetensors", ".safetensors.index.json")) for name in written)
    else:
        assert {"adapter_model.safetensors", "adapter_config.json"} <= written.keys()
        assert json.loads(written["adapter_config.json"])["base_model_name_or_path"] == VERSION
    assert not any(str(folder).encode() in content for content in written.values()), "and no path"


def loading_forgets_all_momentum(open_one: Opener, folder: Path) -> None:
    ours, other, fresh = open_one("main"), open_one("main"), open_one("main")
    ours.step(batch(0), GOING_ON)
    ours.write(new(folder, "written"), VERSION)
    version = open_one.version(folder / "written", folder / "version")
    for first in (10, 20):
        other.step(batch(first), GOING_ON)
    for one in (other, fresh):
        one.load(version)
    assert other.freeze() == fresh.freeze()


def the_base_answers_as_the_base(open_one: Opener, folder: Path) -> None:
    ours = open_one("main")
    answers = ours.fingerprint_of_base()
    assert len(answers.logprobs) == len(answers.token_ids) - 1
    assert answers == open_one("main").fingerprint_of_base()
    ours.step(batch(0), GOING_ON)
    assert ours.write(folder, VERSION) != answers, "and not as its child"


def it_may_be_closed_twice(open_one: Opener, _: Path) -> None:
    ours = open_one("main")
    ours.step(batch(0), GOING_ON)
    ours.close()
    ours.close()


PROMISES: tuple[Promise, ...] = (
    it_says_what_it_can_be_given,
    a_step_changes_the_weights_and_is_measured,
    corrections_are_trained,
    equal_calls_make_equal_weights,
    freezing_changes_nothing,
    another_process_goes_on_as_if_nothing_had_happened,
    it_goes_back,
    lineages_share_no_blob,
    what_is_not_finite_changes_nothing,
    a_step_that_is_told_to_stop_is_abandoned,
    a_version_is_what_was_trained,
    a_version_holds_weights_alone,
    loading_forgets_all_momentum,
    the_base_answers_as_the_base,
    it_may_be_closed_twice,
)
