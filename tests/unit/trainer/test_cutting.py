"""Who makes room in a full queue in which all wait for others."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

from headrace_trainer.batches.cutting import Cutter
from headrace_trainer.experiences.state import LineageState
from headrace_trainer.settings import MemorySettings
from tests.unit.trainer.conftest import Make
from tests.unit.trainer.test_history import chain, name
from tests.unit.trainer.test_state import LIMITS
from tests.unit.trainer.world import START, experience


def test_the_older_half_makes_room(make: Make, tmp_path: Path) -> None:
    cutter = Cutter(make(advantage={"kind": "grpo"}, group_size=2, group_wait_s=100.0))
    state = LineageState(chain(0), LIMITS, MemorySettings(queue_experiences=4))
    for number, after_s in enumerate((0, 10, 60, 70)):
        one = experience(number, name(0), task=f"t{number}", run="0", reward=0.0)
        state.admit(one, (0, number), START + timedelta(seconds=after_s))
    now = START + timedelta(seconds=71)
    assert cutter.next(state, now) == ()
    assert [(one.experience_id, one.dropped) for one in state.outcomes] == [("e0", "singleton"), ("e1", "singleton")]

    for number in (12, 13):
        state.admit(experience(number, name(0), task=f"t{number - 10}", run="1", reward=1.0), (0, number), now)
    batch = cutter.next(state, now)
    assert [item.experience.experience_id for item in batch] == ["e2", "e12", "e3", "e13"]
