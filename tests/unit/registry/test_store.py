"""What is read of a model is that model's, and as far as was asked."""

from __future__ import annotations

from headrace_registry import store
from tests.unit.registry.rig import MODEL, Rig
from tests.unit.registry.test_ledger import NOBODY, OTHER, book


async def test_a_model_is_read_by_its_name(rig: Rig) -> None:
    async with book(rig) as made:
        assert await store.model(made.tx, MODEL) is None
        (mine,) = await made.crown(0)
        (theirs,) = await made.crown(0, model=OTHER)
        assert ((await made.model()).champion, (await made.model(OTHER)).champion) == (mine, theirs)
        assert (await made.version(mine)).model == MODEL
        assert await store.version(made.tx, NOBODY) is None


async def test_versions_come_newest_first_and_no_more_than_wanted(rig: Rig) -> None:
    async with book(rig) as made:
        names = [await made.add(step) for step in (2, 0, 1)]
        await made.add(9, model=OTHER)
        assert [one.version for one in await store.newest(made.tx, MODEL, 10)] == names[::-1]
        assert [one.version for one in await store.newest(made.tx, MODEL, 2)] == [names[2], names[1]]


async def test_only_what_is_withdrawn_is_listed_so_the_last_one_first(rig: Rig) -> None:
    async with book(rig) as made:
        names = [await made.add(step) for step in range(3)]
        theirs = await made.add(9, model=OTHER)
        await made.ledger.withdraw(await made.model(), names[0], "bad")
        await made.ledger.withdraw(await made.model(), names[1], "bad")
        await made.ledger.withdraw(await made.model(OTHER), theirs, "bad")
        assert await store.withdrawn(made.tx, MODEL, 10) == [names[1], names[0]]
        assert await store.withdrawn(made.tx, MODEL, 1) == [names[1]]


async def test_ancestry_is_the_line_back_to_what_is_not_registered(rig: Rig) -> None:
    async with book(rig) as made:
        first = await made.add(0, NOBODY)
        second = await made.add(1, first)
        third = await made.add(2, second)
        await made.add(3, second)
        assert await store.ancestry(made.tx, third) == {first, second, third}
        assert await store.ancestry(made.tx, None) == set()
        assert {one.version for one in await store.children(made.tx, [second])} >= {third}


async def test_a_view_has_what_waits_who_has_a_role_and_the_bases(rig: Rig) -> None:
    async with book(rig) as made:
        previous, champion = await made.crown(0, 1)
        rejected, candidate = await made.add(2), await made.add(3)
        await made.ledger.reject(await made.model(), rejected, "worse", {})
        await made.ledger.adopt(await made.model(), candidate, ())
        event, manifest = made.checkpoint(4, base=rejected)
        await made.ledger.register(event, manifest, None)
        await made.add(5, model=OTHER)
        for gate, name in (("gate", champion), ("another gate", candidate)):
            await made.ledger.evaluated(await made.version(name), gate, {"t": 0.5}, {})
        view = await store.view(made.tx, await made.model(), "gate")
        assert [one.version for one in view.waiting] == [event.version]
        assert {*view.versions} == {previous, champion, candidate, event.version, rejected}
        assert {name: one.scores for name, one in view.evaluations.items()} == {champion: {"t": 0.5}}
