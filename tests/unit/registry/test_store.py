"""Reads of one model return rows of that model only, within the limit."""

from __future__ import annotations

from sqlalchemy import update

from headrace_registry.storage import store
from headrace_registry.storage.tables import VERSIONS
from tests.unit.registry.registry_state import NOBODY, OTHER, RegistryState
from tests.unit.registry.rig import MODEL, START


async def test_load_model_reads_the_model_of_that_name(registry: RegistryState) -> None:
    assert await store.load_model(registry.tx, MODEL) is None
    (mine,) = await registry.promote_in_turn(0)
    (other_version,) = await registry.promote_in_turn(0, model=OTHER)
    assert ((await registry.model()).champion, (await registry.model(OTHER)).champion) == (mine, other_version)
    assert (await registry.version(mine)).model == MODEL
    assert await store.load_version(registry.tx, NOBODY) is None


async def test_newest_versions_are_ordered_and_limited(registry: RegistryState) -> None:
    names = [await registry.add(step) for step in (2, 0, 1)]
    await registry.add(9, model=OTHER)
    assert [version_record.version for version_record in await store.newest_versions(registry.tx, MODEL, 10)] == names[
        ::-1
    ]
    assert [version_record.version for version_record in await store.newest_versions(registry.tx, MODEL, 2)] == [
        names[2],
        names[1],
    ]


async def test_withdrawn_versions_are_ordered_by_withdrawal(registry: RegistryState) -> None:
    names = [await registry.add(step) for step in range(3)]
    other_version = await registry.add(9, model=OTHER)
    await registry.transition.withdraw(await registry.model(), names[0], "bad")
    await registry.transition.withdraw(await registry.model(), names[1], "bad")
    await registry.transition.withdraw(await registry.model(OTHER), other_version, "bad")
    assert await store.withdrawn_versions(registry.tx, MODEL, 10) == [names[1], names[0]]
    assert await store.withdrawn_versions(registry.tx, MODEL, 1) == [names[1]]


async def test_ancestry_ends_at_an_unregistered_parent(registry: RegistryState) -> None:
    first = await registry.add(0, NOBODY)
    second = await registry.add(1, first)
    third = await registry.add(2, second)
    await registry.add(3, second)
    assert await store.ancestry(registry.tx, third) == {first, second, third}
    assert await store.ancestry(registry.tx, None) == set()
    assert {version_record.version for version_record in await store.children(registry.tx, [second])} >= {third}


async def test_load_view_has_waiting_versions_roles_and_bases(registry: RegistryState) -> None:
    previous, champion = await registry.promote_in_turn(0, 1)
    rejected, candidate = await registry.add(2), await registry.add(3)
    await registry.transition.reject(await registry.model(), rejected, "worse", {})
    await registry.transition.adopt(await registry.model(), candidate, ())
    event, manifest = registry.checkpoint(4, base=rejected)
    await registry.transition.register(event, manifest, None)
    await registry.add(5, model=OTHER)
    view = await store.load_view(registry.tx, await registry.model(), "gate")
    assert [version_record.version for version_record in view.waiting] == [event.version]
    assert {*view.versions} == {previous, champion, candidate, event.version, rejected}


async def test_load_view_has_untrained_versions_only_on_request(registry: RegistryState) -> None:
    event, manifest = registry.checkpoint(0)
    await registry.transition.register(event, manifest, None, trained=False)
    assert (await store.load_view(registry.tx, await registry.model(), "gate")).waiting == ()
    await registry.transition.request(await registry.version(event.version), "gate")
    (waiting,) = (await store.load_view(registry.tx, await registry.model(), "gate")).waiting
    assert waiting.version == event.version


async def test_load_view_counts_rollouts_of_the_model(registry: RegistryState) -> None:
    await registry.promote_in_turn(0)
    for begun in range(3):
        view = await store.load_view(registry.tx, await registry.model(), "gate", now=START)
        assert (view.under_way, view.slots, view.rollouts_last_hour) == (begun, 2 if begun else None, begun)
        if begun < 2:
            await registry.roll_out(1 + begun)
    assert (await store.load_view(registry.tx, await registry.model(), "gate")).rollouts_last_hour == 0, (
        "nobody said what time it is"
    )


async def test_load_version_reports_collected_files(registry: RegistryState) -> None:
    present, retired = [await registry.add(step) for step in range(2)]
    await registry.tx.execute(update(VERSIONS).where(VERSIONS.c.version == retired).values(collected_ms=1))
    assert [(await registry.version(name)).collected for name in (present, retired)] == [False, True]


async def test_load_view_uses_audits_of_the_present_gate(registry: RegistryState) -> None:
    previous, champion = await registry.promote_in_turn(0, 1)
    for gate, name in (("gate", champion), ("another gate", previous)):
        await registry.transition.record_audit(await registry.version(name), gate, {"t": 0.5}, {})
    view = await store.load_view(registry.tx, await registry.model(), "gate")
    assert view.audited == {champion}
