"""kill -9 at any point: a new process on the same database continues where the old one was."""

from __future__ import annotations

import pytest

from headrace_runtime.errors import Unavailable
from headrace_schemas import Event, ModelEvent, Routing
from tests.unit.registry.rig import Rig


async def reboot(rig: Rig) -> None:
    rig.boot()
    await rig.lease.acquire()
    await rig.processor.recover()


@pytest.mark.parametrize("ticks", range(4))
async def test_crash_after_any_step_changes_no_outcome(rig: Rig, ticks: int) -> None:
    (old,) = await rig.promote_in_turn(0)
    new = await rig.checkpoint(1)
    for _ in range(ticks):
        await rig.model_controller.tick()
        rig.follow()
    await reboot(rig)
    async with rig.running():
        await rig.until(lambda: ("promoted", new) in rig.decided())
    decided = [d for d in rig.decided() if d[1] == new]
    assert decided == [(d, new) for d in ("registered", "probed", "promoted")], "each once"
    assert rig.routing.aliases == {"champion": new, "previous": old}


async def test_trial_after_a_crash_spends_its_error_again(rig: Rig) -> None:
    (old,) = await rig.promote_in_turn(0)
    new = await rig.checkpoint(1)
    rig.gate.open.clear()
    async with rig.running():
        await rig.until(lambda: rig.gate.runs == [{old}, {old, new}])
    await reboot(rig)
    rig.gate.open.set()
    async with rig.running():
        await rig.until(lambda: ("promoted", new) in rig.decided())
    assert rig.gate.runs[:3] == [{old}, {old, new}, {old, new}]
    seeds = [seed for version, task, seed in rig.gate.requests if version == new and task.startswith("t")]
    assert len(set(seeds)) == len(seeds), "other draws than those that may have been seen already"
    assert rig.last("promoted").statistics["trial"] == 2


async def test_decision_without_a_bus_is_published_by_the_next_process(rig: Rig) -> None:
    await rig.promote_in_turn(0)
    new = await rig.checkpoint(1)
    before = len(rig.bus.events)
    rig.bus.away = True
    with pytest.raises(Unavailable):
        await rig.model_controller.tick()
    assert len(rig.bus.events) == before
    rig.bus.away = False
    await reboot(rig)
    assert [served.version for served in rig.routing.serve][-1] == new


async def test_events_published_twice_are_equal(rig: Rig) -> None:
    await rig.promote_in_turn(0)
    await rig.checkpoint(1)
    last = rig.last("registered")  # sent; the outbox row would go with the next transaction
    await reboot(rig)
    assert [event for event in rig.bus.events if event.event_id == last.event_id] == [last, last]


async def test_role_change_and_its_event_share_a_transaction(rig: Rig) -> None:
    """The order on the bus: a decision is never behind the routing that it led to."""
    await rig.promote_in_turn(0, 1)
    order: list[Event] = [event for event in rig.bus.events if isinstance(event, ModelEvent | Routing)]
    for position, event in enumerate(order):
        if isinstance(event, Routing) and event.champion:
            earlier = [e.version for e in order[:position] if isinstance(e, ModelEvent) and e.decision == "promoted"]
            assert event.champion in earlier
