"""The version that a rollback restores, also in repeated rollbacks."""

from __future__ import annotations

from sqlalchemy import select

from headrace_registry.storage import store
from headrace_registry.storage.tables import CHAMPIONS
from tests.unit.registry.registry_state import RegistryState
from tests.unit.registry.rig import MODEL


async def _back(registry: RegistryState) -> tuple[str | None, str | None]:
    await registry.transition.roll_back(await registry.model(), "worse")
    model = await registry.model()
    return model.champion, model.previous


async def test_rollback_target_is_the_champion_before_in_repeated_rollbacks(registry: RegistryState) -> None:
    first, second, third, _ = await registry.promote_in_turn(0, 1, 2, 3)
    assert await _back(registry) == (third, second)
    assert await _back(registry) == (second, first)
    assert await _back(registry) == (first, None)


async def test_rollback_target_skips_a_withdrawn_champion(registry: RegistryState) -> None:
    """Without a history of champions, there was no version left to restore."""
    first = await registry.add(0)
    await registry.transition.promote(await registry.model(), first, "", {})
    line = [first]
    for step in (1, 2):
        sibling = await registry.add(step)  # a sibling, not a child: withdrawing one leaves the other
        await registry.transition.promote(await registry.model(), sibling, "", {})
        line.append(sibling)
    await registry.transition.withdraw(await registry.model(), line[1], "complaints")
    assert (await registry.model()).previous == first
    assert await _back(registry) == (first, None)


async def test_rollback_target_counts_a_repeated_champion_once(registry: RegistryState) -> None:
    first, second = [await registry.add(step) for step in (0, 1)]
    for version in (first, second, first):
        await registry.transition.promote(await registry.model(), version, "", {})
    assert (await registry.model()).previous == second
    assert await _back(registry) == (second, None), "the first one is withdrawn"
    left = list((await registry.tx.execute(select(CHAMPIONS.c.version))).scalars())
    assert left == [first, second]


async def test_rollback_target_skips_a_version_that_waits_again(registry: RegistryState) -> None:
    first, second, _ = await registry.promote_in_turn(0, 1, 2)
    await registry.transition.request(await registry.version(second), "gate")
    assert await store.rollback_target(registry.tx, MODEL, (await registry.model()).champion) == first
