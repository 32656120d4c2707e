"""The bus has the routing of the database, or it is published again."""

from __future__ import annotations

import pytest

from headrace_registry.versions.reconcile import Reconciler
from headrace_schemas import Routing
from tests.unit.registry.rig import MODEL, Rig

PATIENCE_S = 5.0


async def test_reconciler_publishes_a_lost_routing_with_a_higher_revision(rig: Rig) -> None:
    await rig.promote_in_turn(0)
    last = rig.routing
    on_bus: dict[str, Routing] = {}
    reconciler = Reconciler(rig.processor, rig.lease, on_bus, rig.clock, PATIENCE_S)
    await reconciler.tick()
    assert rig.routing == last, "it may be on its way"
    rig.clock.elapsed_s += PATIENCE_S
    on_bus[MODEL] = last.model_copy(update={"revision": 41, "aliases": {}})
    await reconciler.tick()
    assert rig.routing == last.model_copy(update={"revision": 42, "time": rig.clock.now()})
    on_bus[MODEL] = rig.routing
    for _ in range(3):
        rig.clock.elapsed_s += 10 * PATIENCE_S
        await reconciler.tick()
    assert rig.routing.revision == 42, "nothing to do"


async def test_reconciler_ignores_a_difference_that_ends(rig: Rig) -> None:
    await rig.promote_in_turn(0)
    revision = rig.routing.revision
    on_bus: dict[str, Routing] = {}
    reconciler = Reconciler(rig.processor, rig.lease, on_bus, rig.clock, PATIENCE_S)
    for _ in range(5):
        on_bus.clear()
        await reconciler.tick()
        rig.clock.elapsed_s += PATIENCE_S - 1
        on_bus[MODEL] = rig.routing
        await reconciler.tick()
    assert rig.routing.revision == revision


async def test_reconciler_ignores_a_model_without_a_routing(rig: Rig) -> None:
    await rig.checkpoint(0)
    reconciler = Reconciler(rig.processor, rig.lease, {}, rig.clock, 0.0)
    await reconciler.tick()
    await reconciler.tick()
    assert rig.sent(Routing) == []


@pytest.mark.parametrize(("waited_s", "again"), [(PATIENCE_S - 0.5, False), (PATIENCE_S, True), (PATIENCE_S + 1, True)])
async def test_reconciler_grace_starts_with_the_difference(rig: Rig, waited_s: float, again: bool) -> None:
    await rig.checkpoint(0)
    await rig.ticks()
    revision = rig.routing.revision
    assert revision == 0
    rig.clock.elapsed_s += 1000.0
    reconciler = Reconciler(rig.processor, rig.lease, {}, rig.clock, PATIENCE_S)
    await reconciler.tick()
    rig.clock.elapsed_s += waited_s / 2
    await reconciler.tick()
    rig.clock.elapsed_s += waited_s / 2
    await reconciler.tick()
    assert rig.routing.revision == revision + again, "a bus that has nothing gets the next revision"
    await reconciler.tick()
    assert rig.routing.revision == revision + again, "it is on its way now"
