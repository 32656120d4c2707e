"""Tests of the readiness of batches, of groups, of undecided steps, and of the threads that compute steps.

An undecided step waits for more experiences. The bytes do not depend on the thread.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load

from headrace_runtime.clock import epoch_ms
from headrace_schemas import Experience
from headrace_trainer.algorithms.catalog.hindsight import GapEstimate, HindsightSettings, ReplyBlock, StepDecision
from headrace_trainer.batches.cutting import END_OF_TIME, Cutter
from headrace_trainer.experiences.waiting import BatchRules, Selection, WaitingExperience, run_of, select
from headrace_trainer.lineage.health import TrainingStopped
from headrace_trainer.lineage.lineage import Lineage
from headrace_trainer.torch_learner import hindsight as teaching
from headrace_trainer.torch_learner.learner import TorchLearner
from headrace_trainer.trainer import Trainer
from tests.support.tiny_model import conversations, encoder
from tests.unit.trainer.conftest import Make
from tests.unit.trainer.test_batch import named, waiting
from tests.unit.trainer.test_hindsight import lineage_with_events, teacher_of
from tests.unit.trainer.test_recorded import AGAIN, copied, digests, recorded
from tests.unit.trainer.world import START, World, experience

GOING_ON = threading.Event()
BATCH, DECIDED = 6, 10
LAST = 24


def decided(gap: GapEstimate, settings: HindsightSettings) -> StepDecision | None:
    """Replace `refusal`: accept the gap once it is estimated from `DECIDED` runs."""
    return None if gap.count >= DECIDED else StepDecision(f"{gap.count} runs", undecided=gap.count < settings.runs_max)


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accept a base without any gap from `DECIDED` runs on."""
    monkeypatch.setattr(teaching, "refusal", decided)


def begun(world: World, make: Make, base: Path, count: int, batch: int = BATCH, **settings: Any) -> Lineage:
    """Return a lineage that has read the first `count` experiences of the conversations."""
    lineage = lineage_with_events(world, make, lambda _: [], batch_experiences=batch, **settings)
    more(lineage, base, 0, count)
    return lineage


def more(lineage: Lineage, base: Path, start: int, stop: int) -> None:
    for index, event in enumerate(lesson_events(base, lineage.state.history.head)[start:stop], start):
        lineage.state.admit(event, (0, index), START)


def lesson_events(base: Path, version: str) -> Sequence[Experience]:
    return conversations(encoder(base), version, LAST, seed=4)


def step(lineage: Lineage) -> int:
    """Train the next batch, if there is one, and return its number of experiences."""
    items = lineage.next_batch()
    if items:
        lineage.step(items, GOING_ON)
    return len(items)


def weights(lineage: Lineage) -> bytes:
    assert isinstance(lineage.learner, TorchLearner)
    return bytes(lineage.learner.freeze().weights)


@pytest.mark.usefixtures("later")
def test_it_waits_for_as_many_more_and_is_then_the_step_of_them_all(tmp_path: Path, make: Make, base: Path) -> None:
    world = World(tmp_path)
    lineage, at_once = begun(world, make, base, BATCH), begun(World(tmp_path / "b"), make, base, 12, batch=12)
    first = weights(lineage)
    assert step(lineage) == BATCH
    assert (lineage.state.steps, lineage.health.stopped, weights(lineage)) == (0, None, first)
    more(lineage, base, BATCH, 11)
    world.clock.offset_s += timedelta(days=1).total_seconds()
    assert step(lineage) == 0, "no time is long enough"
    more(lineage, base, 11, 12)
    assert (step(lineage), step(at_once)) == (12, 12)
    assert lineage.state.steps == 1
    assert weights(lineage) == weights(at_once) != first, "one whole step, and no longer one"
    assert teacher_of(lineage).gap == teacher_of(at_once).gap
    assert teacher_of(lineage).gap.count == 12, "each run once"
    more(lineage, base, 12, 18)
    assert step(lineage) == BATCH, "from now on batches are as large as they were to be"


@pytest.mark.usefixtures("later")
def test_planted_runs_that_are_measured_twice_would_be_seen(
    tmp_path: Path, make: Make, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = teaching.HindsightTeacher.blocks

    def twice(self: Any, rows: Any) -> list[ReplyBlock]:
        blocks = sound(self, rows)
        self.gap = self.gap.plus(blocks)
        return blocks

    monkeypatch.setattr(teaching.HindsightTeacher, "blocks", twice)
    lineage = begun(World(tmp_path), make, base, BATCH)
    step(lineage)
    more(lineage, base, BATCH, 12)
    step(lineage)
    assert teacher_of(lineage).gap.count != 12


@pytest.mark.usefixtures("later")
def test_the_next_process_measures_the_same_again(tmp_path: Path, make: Make, base: Path) -> None:
    world = World(tmp_path)
    lineage = begun(world, make, base, BATCH)
    step(lineage)
    lineage.save(publish=False)
    lineage.close()
    lineage = lineage_with_events(world, make, lambda _: [], batch_experiences=BATCH)
    more(lineage, base, 0, 12)
    assert [step(lineage), step(lineage), lineage.state.steps] == [BATCH, 12, 1]
    other = begun(World(tmp_path / "b"), make, base, 12, batch=12)
    step(other)
    assert weights(lineage) == weights(other)


def test_it_ends_with_the_last_run_that_it_is_given(tmp_path: Path, make: Make, base: Path) -> None:
    last = {"kind": "hindsight", "hindsight": {"runs_max": 12}}
    lineage = begun(World(tmp_path), make, base, LAST, advantage=last)
    assert [step(lineage), step(lineage), step(lineage)] == [BATCH, 12, 0]
    assert lineage.health.stopped is not None
    assert "over 12 runs, and not surely positive" in lineage.health.stopped.reason
    lineage.resume()
    assert [step(lineage), step(lineage), step(lineage)] == [BATCH, 12, 0], "of the same, the same is said"


def test_where_nothing_more_comes_it_is_refused(tmp_path: Path, make: Make, base: Path) -> None:
    lineage = begun(World(tmp_path), make, base, 10)
    seen = []
    while items := lineage.next_batch(at_end=True):
        lineage.step(items, GOING_ON)
        seen.append(len(items))
    assert seen == [BATCH, 10, 10], "all that there is, and once more when nothing was added to it"
    assert lineage.health.stopped is not None
    assert "over 10 runs" in lineage.health.stopped.reason


def test_a_full_queue_is_the_end_of_waiting(tmp_path: Path, make: Make, base: Path) -> None:
    lineage = begun(World(tmp_path), make, base, 8, memory={"queue_experiences": 8})
    assert [step(lineage), step(lineage), step(lineage), step(lineage)] == [BATCH, 8, 8, 0]
    assert lineage.health.stopped is not None


async def test_a_job_that_was_never_decided_fails(tmp_path: Path, make: Make, base: Path) -> None:
    world = World(tmp_path)
    settings = make(algorithm="hindsight", batch_experiences=BATCH)
    await world.run(settings)
    world.bus.produce(*lesson_events(base, world.bus.checkpoints[0].version)[:10])
    for cut in ("rules", "recorded"):
        again = settings.model_copy(update={"until_end": True, "cut": cut, "lineage": cut, "replays": "main"})
        if cut == "recorded":
            world.bus = copied([(record, (BATCH,) if n == 7 else ()) for n, record in enumerate(_experiences(world))])
            again = again.model_copy(update={"topic": "copy"})
        with pytest.raises(TrainingStopped, match=r"has stopped training: the gap"):
            await world.run(again)


def _experiences(world: World) -> list[Experience]:
    return [Experience.from_json(record.value or b"") for record in world.bus.records]


@pytest.mark.usefixtures("later")
async def test_a_replay_of_what_was_recorded_takes_the_same_steps(tmp_path: Path, make: Make, base: Path) -> None:
    world = World(tmp_path)
    settings = make(algorithm="hindsight", batch_experiences=BATCH)
    await world.run(settings)
    for start in (0, BATCH, 12):
        world.bus.produce(*lesson_events(base, world.bus.checkpoints[0].version)[start : start + BATCH])
        live = await world.run(settings)
    cuts = [batch.experiences for account in world.bus.accounts for batch in account.batches]
    assert cuts == [12, 6]
    again = World(tmp_path)
    again.bus = copied(recorded(world))
    replayed = await again.run(make(algorithm="hindsight", batch_experiences=BATCH, cut="recorded", **AGAIN))
    assert digests(again.bus.accounts) == digests(world.bus.accounts)
    assert _end(replayed) == _end(live)


def _end(trainer: Trainer) -> tuple[dict[str, bytes], GapEstimate]:
    assert trainer.lineage is not None
    tensors = load(weights(trainer.lineage))  # the file also has the name of the lineage
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}, teacher_of(trainer.lineage).gap


def test_an_undecided_step_also_takes_the_next_recorded_batch(make: Make) -> None:
    """The recorded algorithm decided every step, so the recording has no larger batch after an undecided step."""
    cutter = Cutter(make(cut="recorded", batch_experiences=2))
    state = waiting(1.0, 2.0, 3.0, 4.0, 5.0)
    assert named(cutter.next_batch(state, START, 2)) == ["e0", "e1"]
    assert named(cutter.next_batch(state, START, 3, undecided=2)) == ["e0", "e1", "e2", "e3", "e4"]
    assert cutter.next_batch(state, START, undecided=2) == ()
    assert named(cutter.next_batch(state, END_OF_TIME, undecided=2)) == ["e0", "e1"]


V = "m@000000000000"
PLAIN = BatchRules(
    experiences=3, experiences_min=2, wait=timedelta(seconds=10), group_size=0, group_wait=timedelta(seconds=60)
)
GROUPED = BatchRules(
    experiences=4, experiences_min=2, wait=timedelta(seconds=10), group_size=2, group_wait=timedelta(seconds=60)
)


def waits(number: int, task: str | None = None, run: str | None = None, at_s: float = 0.0) -> WaitingExperience:
    since = epoch_ms(START + timedelta(seconds=at_s))
    return WaitingExperience(experience=experience(number, V, task=task, run=run), since_ms=since)


def chosen(
    items: Sequence[WaitingExperience], rules: BatchRules, at_s: float = 0.0, full: bool = False, corrections: str = ""
) -> tuple[str, str]:
    selection: Selection = select(
        items,
        rules,
        START + timedelta(seconds=at_s),
        full,
        lambda item: item.experience.experience_id[1] in corrections,
    )
    batch = "".join(item.experience.experience_id[1:] for item in selection.batch)
    return batch, "".join(item.experience.experience_id[1:] for item in selection.singletons)


def test_a_full_batch_goes_at_once_in_order_of_arrival() -> None:
    assert chosen([waits(n) for n in range(5)], PLAIN) == ("012", "")


def test_a_smaller_one_goes_when_its_oldest_has_waited() -> None:
    two = [waits(0), waits(1, at_s=9)]
    assert chosen(two, PLAIN, at_s=9.9) == ("", "")
    assert chosen(two, PLAIN, at_s=10) == ("01", "")
    assert chosen(two[:1], PLAIN, at_s=100) == ("", ""), "fewer than the minimum never go by time"


def test_a_full_queue_does_not_wait_for_what_cannot_come() -> None:
    assert chosen([waits(0)], PLAIN, full=True) == ("0", "")
    assert chosen([], PLAIN, full=True) == ("", "")


def test_branches_of_one_run_stay_together() -> None:
    items = [waits(n, task="a", run=str(max(n, 2))) for n in range(2, 4)]
    items += [waits(4, "a", "x"), waits(5, "a", "x"), waits(6, "a", "y")]
    assert chosen(items, PLAIN) == ("2345", "")


def test_a_run_is_named_by_task_and_run_id_else_by_its_trajectory() -> None:
    assert run_of(experience(1, V, task="a", run="0")) == run_of(experience(2, V, task="a", run="0"))
    assert run_of(experience(1, V, task="a", run="0")) != run_of(experience(2, V, task="b", run="0"))
    assert run_of(experience(1, V, run="0")) != run_of(experience(2, V, run="0")), "without a task a run id says little"
    assert run_of(experience(1, V, task="a")) != run_of(experience(2, V, task="a")), "nor does a task without a run id"


def test_groups_wait_for_their_runs() -> None:
    items = [waits(0, "a", "0"), waits(1, "b", "0"), waits(2, "a", "1"), waits(3, "c", "0")]
    assert chosen(items, GROUPED) == ("", ""), "one group of two is less than a batch"
    assert chosen([*items, waits(4, "b", "1")], GROUPED) == ("0214", "")


def test_branches_of_one_run_are_no_group() -> None:
    items = [waits(n, "a", "0") for n in range(4)]
    assert chosen(items, GROUPED) == ("", "")
    assert chosen(items, GROUPED, at_s=60) == ("", "0123")


def test_a_late_group_is_used_as_it_is_and_a_late_single_run_is_dropped() -> None:
    three = BatchRules(4, 2, timedelta(seconds=10), 3, timedelta(seconds=60))
    items = [waits(0, "a", "0"), waits(1, "a", "1"), waits(2, "b", "0")]
    assert chosen(items, three, at_s=59) == ("", "")
    assert chosen(items, three, at_s=60) == ("01", "2")


def test_a_run_of_no_task_can_never_have_a_group() -> None:
    assert chosen([waits(0, None, "0"), waits(1, "a", "0")], GROUPED) == ("", "0")


def test_a_group_is_never_cut_and_corrections_need_none() -> None:
    items = [waits(n, "a", str(n)) for n in range(3)] + [waits(3, "b", "0")] + [waits(n, "c", str(n)) for n in (4, 5)]
    assert chosen(items, GROUPED, corrections="3") == ("3012", ""), "the correction, then all of group a"
    five = [waits(n, "a", str(n)) for n in range(5)]
    assert chosen([*five, waits(6, "b", "0")], GROUPED)[0] == "01234"


def test_a_group_is_late_when_its_first_member_is() -> None:
    three = BatchRules(4, 2, timedelta(seconds=10), 3, timedelta(seconds=60))
    items = [waits(0, "a", "0"), waits(1, "a", "1", at_s=30)]
    assert chosen(items, three, at_s=60) == ("01", "")


def test_what_came_without_a_branch_has_no_tokens() -> None:
    assert WaitingExperience(experience=experience(0, V, length=14), since_ms=0).tokens == 14
    assert WaitingExperience(experience=experience(0, V, None, branch=False), since_ms=0).tokens == 0


WAITING_THREADS_START = """
import os, runpy, sys
from headrace_runtime.main import Service
Service.main = lambda self: print(os.environ["OMP_WAIT_POLICY"], "torch" in sys.modules)
runpy.run_module("headrace_trainer", run_name="__main__")
"""


@pytest.mark.parametrize(("policy", "expected"), [(None, "passive"), ("active", "active")])
def test_it_is_set_before_torch_is_loaded_unless_somebody_else_did(policy: str | None, expected: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    if policy is not None:
        environment["OMP_WAIT_POLICY"] = policy
    command = [sys.executable, "-c", WAITING_THREADS_START]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=600)
    assert process.stdout.split() == [expected, "False"]
