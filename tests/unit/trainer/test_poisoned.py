"""An experience that breaks admission or the preparation of a batch is dropped as `invalid`; the others are trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from headrace_trainer.batches.prepare import find_poisoned, prepare
from headrace_trainer.experiences import admission
from headrace_trainer.lineage import lineage
from tests.unit.trainer.conftest import Make
from tests.unit.trainer.world import World, experience

ERRORS: dict[str, Callable[[], Exception]] = {
    "ValueError": lambda: ValueError("poison with \x00 and \ud83d"),
    "UnicodeEncodeError": lambda: UnicodeEncodeError("utf-8", "bad \ud83d end", 4, 5, "surrogates not allowed"),
    "OverflowError": lambda: OverflowError("math range error"),
    "RecursionError": lambda: RecursionError("maximum recursion depth exceeded"),
}


@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize("bad", [{0}, {3}, {0, 3}, {0, 1, 2, 3}], ids=str)
def test_the_items_at_fault_are_named(bad: set[int], kind: str) -> None:
    items: Any = [0, 1, 2, 3]

    def ready(some: Sequence[Any]) -> None:
        if bad.intersection(some):
            raise ERRORS[kind]()

    culprits = find_poisoned(items, ready)
    names: set[Any] = {item for item, _ in culprits}
    assert names == bad
    assert all(kind in reason for _, reason in culprits)


def test_a_batch_that_no_item_is_at_fault_for_blames_nobody() -> None:
    def ready(some: Sequence[Any]) -> None:
        if len(some) > 1:
            raise ValueError("only together, and whoever is left out")

    items: Any = [0, 1, 2, 3]
    assert find_poisoned(items, ready) == []


@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize("stage", ["admission", "prepare"])
async def test_a_poisoned_experience_is_dropped_by_name_and_the_others_are_trained(
    tmp_path: Path, make: Make, monkeypatch: pytest.MonkeyPatch, kind: str, stage: str
) -> None:
    world = World(tmp_path)
    settings = make(batch_experiences=4)
    await world.run(settings)
    first = world.bus.checkpoints[0].version
    experiences = [experience(number, first, reward=number % 3) for number in range(8)]
    victim = experiences[2].experience_id
    if stage == "admission":
        decided = admission._decide

        def decide(event: Any, *rest: Any) -> Any:
            if event.experience_id == victim:
                raise ERRORS[kind]()
            return decided(event, *rest)

        monkeypatch.setattr(admission, "_decide", decide)
    else:

        def planted(items: Any, *rest: Any) -> Any:
            if any(item.experience.experience_id == victim for item in items):
                raise ERRORS[kind]()
            return prepare(items, *rest)

        monkeypatch.setattr(lineage, "prepare", planted)
    world.bus.produce(*experiences)
    await world.run(settings)
    fates = {name: outcome for (name, _), outcome in world.bus.fates.items()}
    assert fates[victim] == "invalid"
    other_fates = [fates.get(sound.experience_id) for sound in experiences if sound.experience_id != victim]
    assert other_fates.count("trained") >= 4
    assert set(other_fates) <= {"trained", None}, "what waits for a batch has no outcome yet"
    await world.run(settings)
    assert {name: outcome for (name, _), outcome in world.bus.fates.items()}[victim] == "invalid", (
        "also after a restart"
    )
