"""A version, a rollout or a gate run that breaks the registry's code fails alone and by name; the process goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace_registry.control.rollout_controller import RolloutController
from headrace_registry.gate import evaluation
from headrace_registry.versions import lifecycle
from headrace_runtime.errors import Unavailable
from tests.unit.registry.rig import Rig
from tests.unit.registry.rollout_traffic import Traffic, canary, under_way

ERRORS: dict[str, Callable[[], Exception]] = {
    "ValueError": lambda: ValueError("poison with \x00 and \ud83d"),
    "UnicodeEncodeError": lambda: UnicodeEncodeError("utf-8", "bad \ud83d end", 4, 5, "surrogates not allowed"),
    "OverflowError": lambda: OverflowError("math range error"),
    "RecursionError": lambda: RecursionError("maximum recursion depth exceeded"),
    "AssertionError": AssertionError,
}


@pytest.mark.parametrize("kind", ERRORS)
async def test_candidate_without_a_possible_decision_is_rejected(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    (old,) = await rig.promote_in_turn(0)
    bad = await rig.checkpoint(1, parent=old)
    plan = lifecycle.plan

    def planted(view: Any, inputs: Any) -> Any:
        if view.candidate is not None and view.candidate.version == bad:
            raise ERRORS[kind]()
        return plan(view, inputs)

    monkeypatch.setattr(lifecycle, "plan", planted)
    async with rig.running():
        await rig.until(lambda: ("rejected", bad) in rig.decided())
        good = await rig.checkpoint(2, parent=old)
        await rig.until(lambda: ("promoted", good) in rig.decided())
    assert kind in (rig.last("rejected").reason or "")
    assert rig.routing.champion == good


@pytest.mark.parametrize("kind", ERRORS)
async def test_rollout_that_cannot_be_read_is_held(data_dir: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    rig = Rig(data_dir, settings=canary())
    await rig.start()
    try:
        await rig.promote_in_turn(0)
        await under_way(rig)
        await rig.model_controller.tick()

        async def planted(_self: RolloutController, _rollout: object) -> None:
            raise ERRORS[kind]()

        monkeypatch.setattr(RolloutController, "_take_all_readings", planted)
        for _ in range(4):
            await rig.model_controller.tick()
        last = await Traffic(rig, 14).last()
        assert last.phase == "hold"
        assert kind in last.reason
    finally:
        await rig.database.close()


@pytest.mark.parametrize("kind", ERRORS)
async def test_gate_run_with_an_error_counts_as_failed(rig: Rig, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    (old,) = await rig.promote_in_turn(0)

    async def planted(*_arguments: object, **_named: object) -> object:
        raise ERRORS[kind]()

    monkeypatch.setattr(evaluation, "run_trial", planted)
    bad = await rig.checkpoint(1, parent=old)
    async with rig.running():
        await rig.until(lambda: ("rejected", bad) in rig.decided())
    assert rig.routing.champion == old


async def test_controller_ends_without_its_database(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that no single model causes ends the controller."""
    await rig.promote_in_turn(0)

    async def away(_self: RolloutController, _model: str) -> bool:
        raise Unavailable("the database is away")

    monkeypatch.setattr(RolloutController, "tick", away)
    with pytest.raises(Unavailable):
        await rig.model_controller.tick()
