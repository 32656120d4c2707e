"""States that an earlier release saved, with values that no event may hold today, can be continued."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace_runtime.errors import CorruptBlob
from headrace_schemas.values.arrays import pack_float32
from headrace_trainer.lineage.store import LineageStore
from tests.unit.trainer.conftest import Make
from tests.unit.trainer.test_store import replace_state
from tests.unit.trainer.world import World, experience

Change = Callable[[dict[str, Any]], None]


def set_span(name: str, value: object) -> Change:
    def change(fields: dict[str, Any]) -> None:
        fields["branch"]["spans"][0][name] = value

    return change


def add(name: str, value: object) -> Change:
    def change(fields: dict[str, Any]) -> None:
        fields[name] = value

    return change


NUMBERS: dict[str, Change] = {
    "reward": add("reward", 1.7e308),
    "parts.0.value": add("parts", [{"source": "feedback", "value": -1e300, "weight": 1.0}]),
    "parts.0.weight": add("parts", [{"source": "feedback", "value": 1.0, "weight": 1e16}]),
    "turn_rewards.0.value": add("turn_rewards", [{"turn_id": "t", "value": 1e200}]),
    "branch.spans.0.temperature": set_span("temperature", 1e-39),
    "branch.spans.0.logprobs": set_span("logprobs", pack_float32((-3e38,) * 9)),
    "branch.spans.0.choice": set_span("choice", 2**31),
}

TEXTS: dict[str, Change] = {
    "session_id": add("session_id", "a\0b"),
    "turn_ids": add("turn_ids", ["a\0b"]),
    "task_id": add("task_id", "\0"),
    "turn_id": set_span("turn_id", "\0"),
    "edits": add("edits", [{"turn_id": "t", "message": {"role": "assistant", "content": "x\0y"}}]),
}


async def stored_state(world: World, make: Make) -> dict[str, Any]:
    """Return the JSON of a state in which three experiences wait."""
    await world.run(make())
    version = world.bus.checkpoints[0].version
    world.bus.produce(*(experience(n, version, reward=n % 3) for n in range(7)))
    trainer: Any = await world.run(make())
    trainer.lineage.save(publish=False)
    saved = LineageStore(world.blobs, "main").read()
    assert saved is not None
    assert len(saved.waiting) == 3
    state: dict[str, Any] = json.loads(saved.model_dump_json())
    return state


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.mark.parametrize("path", NUMBERS)
async def test_a_waiting_experience_beyond_a_bound_is_dropped_by_name_and_the_others_wait(
    world: World, make: Make, path: str
) -> None:
    state = await stored_state(world, make)
    NUMBERS[path](state["waiting"][1]["experience"])
    replace_state(world, json.dumps(state).encode())
    names = [item["experience"]["experience_id"] for item in state["waiting"]]
    await world.run(make())
    saved = LineageStore(world.blobs, "main").read()
    assert saved is not None
    assert [item.experience.experience_id for item in saved.waiting] == [names[0], names[2]]
    assert [world.bus.fates.get((name, 0)) for name in names] == [None, "invalid", None]
    assert [outcome.detail.startswith(path) for outcome in saved.metrics.verdicts if outcome.detail] == [True]


@pytest.mark.parametrize("where", TEXTS)
async def test_text_that_nothing_can_hold_is_cleaned_and_the_experience_waits(
    world: World, make: Make, where: str
) -> None:
    state = await stored_state(world, make)
    TEXTS[where](state["waiting"][1]["experience"])
    replace_state(world, json.dumps(state).encode())
    await world.run(make())
    saved = LineageStore(world.blobs, "main").read()
    assert saved is not None
    assert len(saved.waiting) == 3
    assert "\ufffd" in saved.waiting[1].model_dump_json()


@pytest.mark.parametrize(
    "damage", [{"reward": 1e300, "unknown": 1}, {"reward": 1e300, "weight": 7.0}, {"revision": 2**31}], ids=str
)
async def test_a_state_with_other_faults_is_refused_as_before(
    world: World, make: Make, damage: dict[str, object]
) -> None:
    state = await stored_state(world, make)
    state["waiting"][1]["experience"] |= damage
    if "revision" in damage:
        state["steps"] = -1
    replace_state(world, json.dumps(state).encode())
    with pytest.raises(CorruptBlob, match="restore the blob store from a backup"):
        await world.run(make())
