"""When a batch is ready, and which runs make a group.

Threads of a step wait for each other without spinning: that is a setting which torch reads when it is loaded.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from datetime import timedelta

import pytest

from headrace_runtime.clock import epoch_ms
from headrace_trainer.experiences.waiting import BatchRules, Selection, WaitingExperience, run_of, select
from tests.unit.trainer.world import START, experience

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
