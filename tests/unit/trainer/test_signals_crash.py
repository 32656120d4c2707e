"""P4 with edits, preferences and critics: a death at any point does not change the result (`test_crash`)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.algorithms.signals import edit, side, turn, with_signals
from tests.unit.trainer.conftest import Make
from tests.unit.trainer.test_crash import plain_story, tell
from tests.unit.trainer.world import World


def story(world: World, version: str) -> None:
    """Answers meet, edits are trained, redelivered, revised and withdrawn, and a poisoned record lies between."""
    first = [
        with_signals(1, version, preferences=(side("p", "chosen", turn(1)),)),
        with_signals(2, version, preferences=(side("p", "rejected", turn(2)),)),
        with_signals(3, version, edits=(edit("nobody", turn(3)),)),
        with_signals(4, version, preferences=(side("q", "chosen", turn(4)),), edits=(edit("search", turn(4)),)),
        with_signals(5, version, preferences=(side("q", "rejected", turn(5)),)),
        with_signals(6, version, reward=1.0),
        with_signals(7, version, edits=(edit("Monday", turn(7)),)),
    ]
    world.bus.produce(*first, first[2], first[0])
    world.bus.add("experiences", b"poison")
    world.bus.produce(
        with_signals(1, version, revision=1),
        with_signals(3, version, edits=(edit("an invoice", turn(3)),), revision=1),
        with_signals(8, version, edits=(edit("the agent", turn(8)),)),
    )


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("algorithm", "stride"),
    [
        ("dpo", 29),
        ("ppo", 37),
        *(pytest.param(name, 1, marks=[pytest.mark.own_target, pytest.mark.timeout(3000)]) for name in ("sft", "dpo")),
    ],
)
async def test_a_death_at_any_point_changes_nothing(tmp_path: Path, make: Make, algorithm: str, stride: int) -> None:
    settings = make(algorithm=algorithm, memory={"restore_points": 3}, pair_wait_s=1e6, batch_experiences=2)
    told_story = plain_story if algorithm == "ppo" else story
    expected, world, points = await tell(tmp_path / "calm", settings, told_story)
    assert expected["steps"] >= 2
    assert list(world.bus.fates.values()).count("trained") >= 4
    for at in range(1, points + 1, stride):
        result, _, _ = await tell(tmp_path / f"{at}", settings, told_story, at)
        assert result == expected, f"died at point {at}"
