"""What each change leaves in the tables, and which events it owes. Two models, so that none touches the other's."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import pytest
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_registry import store
from headrace_registry.ledger import Ledger
from headrace_registry.records import ModelRecord, VersionRecord
from headrace_schemas import Checkpoint, ModelEvent, Routing
from headrace_schemas.manifest import Manifest
from tests.unit.registry.rig import MODEL, Rig

OTHER = "other"
NOBODY = "m@0123456789ab"


class Book:
    """A ledger and what the tables say, in one transaction."""

    def __init__(self, rig: Rig, tx: AsyncConnection) -> None:
        self._rig = rig
        self.tx = tx
        self.ledger = Ledger(tx, rig.clock.now())

    def checkpoint(
        self, step: int, parent: str | None = None, model: str = MODEL, base: str | None = None
    ) -> tuple[Checkpoint, Manifest]:
        given, ref = self._rig.manifest(step, parent=parent, base=base)
        manifest = given.model_copy(update={"name": model})
        event = Checkpoint(
            time=self._rig.clock.now(),
            model=model,
            version=manifest.version,
            lineage="main",
            step=step,
            parent=parent,
            manifest=ref,
        )
        return event, manifest

    async def add(self, step: int, parent: str | None = None, model: str = MODEL) -> str:
        event, manifest = self.checkpoint(step, parent, model)
        await self.ledger.register(event, manifest, None)
        return event.version

    async def crown(self, *steps: int, model: str = MODEL) -> list[str]:
        """Each trained on from the one before it, and promoted in turn."""
        line: list[str] = []
        for step in steps:
            line.append(await self.add(step, line[-1] if line else None, model))
            await self.ledger.promote(await self.model(model), line[-1], "better", {})
        return line

    async def model(self, name: str = MODEL) -> ModelRecord:
        found = await store.model(self.tx, name)
        assert found
        return found

    async def version(self, name: str) -> VersionRecord:
        found = await store.version(self.tx, name)
        assert found
        return found

    async def states(self, *names: str) -> list[str]:
        return [(await self.version(name)).state for name in names]

    def told(self) -> list[tuple[str, str, str | None]]:
        """Decision, version and previous, since it was last asked."""
        events = [event for event in self.ledger.events if isinstance(event, ModelEvent)]
        self.ledger.events.clear()
        return [(event.decision, event.version, event.previous) for event in events]


@contextlib.asynccontextmanager
async def book(rig: Rig) -> AsyncIterator[Book]:
    async with rig.database.transaction() as tx:
        yield Book(rig, tx)


async def test_a_version_is_kept_as_its_manifest_says_and_only_once(rig: Rig) -> None:
    async with book(rig) as made:
        event, manifest = made.checkpoint(3, base=NOBODY, parent=NOBODY)
        await made.ledger.register(event, manifest, None)
        assert made.told() == [("registered", event.version, NOBODY)]
        found = await made.version(event.version)
        assert (found.state, found.request, found.step, found.base, found.parent) == (
            "registered", "", 3, NOBODY, NOBODY,
        )  # fmt: skip
        assert (found.tokenizer_sha256, found.template_sha256) == ("a" * 64, "b" * 64)
        await made.ledger.register(event, None, "broken")
        assert made.told() == []
        assert await made.version(event.version) == found


async def test_what_has_a_problem_is_rejected_and_nothing_else_is_said_of_it(rig: Rig) -> None:
    async with book(rig) as made:
        parent = await made.add(0)
        await made.ledger.withdraw(await made.model(), parent, "bad")
        made.told()
        event, _ = made.checkpoint(1, parent=parent)
        await made.ledger.register(event, None, "damaged")
        assert made.told() == [("rejected", event.version, None)]
        found = await made.version(event.version)
        assert (found.state, found.base, found.tokenizer_sha256, found.template_sha256) == ("rejected", None, "", "")


async def test_a_model_stays_as_it_is_when_a_version_is_added(rig: Rig) -> None:
    async with book(rig) as made:
        await made.crown(0, 1)
        routings = [event for event in await made.ledger.finish() if isinstance(event, Routing)]
        assert [routing.revision for routing in routings] == [0], "the first one"
        before = await made.model()
        await made.add(2)
        assert await made.model() == before


async def test_only_the_children_of_what_is_withdrawn_are_withdrawn_at_once(rig: Rig) -> None:
    async with book(rig) as made:
        (champion,) = await made.crown(0)
        bad = await made.add(1)
        await made.ledger.withdraw(await made.model(), bad, "bad")
        made.told()
        child = await made.add(2, bad)
        assert made.told() == [("registered", child, bad), ("withdrawn", child, champion)]
        for step, parent in enumerate((champion, NOBODY, None), start=3):
            name = await made.add(step, parent)
            assert made.told() == [("registered", name, parent)]
            assert await made.states(name) == ["registered"]


async def test_the_newest_is_adopted_and_the_others_are_skipped(rig: Rig) -> None:
    async with book(rig) as made:
        (champion,) = await made.crown(0)
        first, second, newest = [await made.add(step) for step in (1, 2, 3)]
        made.told()
        await made.ledger.adopt(await made.model(), newest, (first, second))
        assert await made.states(first, second, newest) == ["skipped", "skipped", "probing"]
        assert made.told() == [("skipped", first, champion), ("skipped", second, champion)]
        assert (await made.model()).candidate == newest


async def test_a_rejected_candidate_makes_room_and_others_do_not(rig: Rig) -> None:
    async with book(rig) as made:
        previous, champion = await made.crown(0, 1)
        candidate, stranger = await made.add(2), await made.add(3)
        await made.ledger.adopt(await made.model(), candidate, ())
        await made.ledger.reject(await made.model(), stranger, "worse", {})
        assert (await made.model()).candidate == candidate
        await made.ledger.reject(await made.model(), candidate, "worse", {"score": 0.5})
        last = made.ledger.events[-1]
        assert isinstance(last, ModelEvent)
        assert last.statistics == {"score": 0.5}
        assert await made.states(stranger, candidate) == ["rejected", "rejected"]
        await made.ledger.adopt(await made.model(), previous, ())
        await made.ledger.reject(await made.model(), previous, "worse", {})
        assert await made.states(previous) == ["promoted"], "it may still take over again"
        model = await made.model()
        assert (model.champion, model.previous, model.candidate) == (champion, previous, None)


async def test_a_rollback_goes_back_the_way_that_promotions_came(rig: Rig) -> None:
    async with book(rig) as made:
        first, second, third = await made.crown(0, 1, 2)
        made.told()
        await made.ledger.roll_back(await made.model(), "users complain")
        model = await made.model()
        assert (model.champion, model.previous) == (second, first)
        assert await made.states(first, second, third) == ["promoted", "promoted", "withdrawn"]
        assert made.told() == [("rolled_back", third, second)]
        await made.ledger.roll_back(model, "still")
        model = await made.model()
        assert (model.champion, model.previous) == (first, None)


async def test_what_is_withdrawn_does_not_stand_behind_the_heir(rig: Rig) -> None:
    async with book(rig) as made:
        first, second, _ = await made.crown(0, 1, 2)
        await made.ledger.withdraw(await made.model(), first, "bad")
        await made.ledger.roll_back(await made.model(), "users complain")
        model = await made.model()
        assert (model.champion, model.previous) == (second, None)


@pytest.mark.parametrize("descends", [True, False])
async def test_a_rollback_takes_the_candidate_and_the_pin_that_descend_from_the_champion(
    rig: Rig, descends: bool
) -> None:
    async with book(rig) as made:
        _, champion = await made.crown(0, 1)
        candidate = await made.add(2, champion if descends else None)
        pinned = await made.add(3, candidate)
        await made.ledger.adopt(await made.model(), candidate, ())
        await made.ledger.pin(await made.model(), pinned)
        await made.ledger.roll_back(await made.model(), "users complain")
        model = await made.model()
        assert (model.candidate, model.pinned) == ((None, None) if descends else (candidate, pinned))
        assert await made.states(candidate, pinned) == (["withdrawn"] * 2 if descends else ["probing", "registered"])


async def test_a_rollback_takes_the_pin_of_the_champion_and_the_heirs_candidacy(rig: Rig) -> None:
    async with book(rig) as made:
        previous, champion = await made.crown(0, 1)
        await made.ledger.adopt(await made.model(), previous, ())
        await made.ledger.pin(await made.model(), champion)
        await made.ledger.roll_back(await made.model(), "users complain")
        model = await made.model()
        assert (model.champion, model.candidate, model.pinned) == (previous, None, None)


async def test_without_a_champion_or_a_previous_there_is_no_rollback(rig: Rig) -> None:
    async with book(rig) as made:
        await made.add(0)
        with pytest.raises(AssertionError):
            await made.ledger.roll_back(await made.model(), "nothing there")
        await made.crown(1)
        with pytest.raises(AssertionError):
            await made.ledger.roll_back(await made.model(), "nothing behind")


async def test_a_withdrawal_takes_all_descendants_once_and_their_roles(rig: Rig) -> None:
    async with book(rig) as made:
        (champion,) = await made.crown(0)
        bad = await made.add(1, champion)
        gone = await made.add(2, bad)
        await made.ledger.withdraw(await made.model(), gone, "leaks")
        child, grandchild = await made.add(3, bad), await made.add(4, gone)
        later = await made.add(5, child)
        await made.ledger.adopt(await made.model(), later, ())
        made.told()
        await made.ledger.withdraw(await made.model(), bad, "bad")
        assert made.told() == [(("withdrawn"), name, champion) for name in (bad, child, later)]
        assert await made.states(bad, gone, child, grandchild, later) == ["withdrawn"] * 5
        model = await made.model()
        assert (model.champion, model.candidate) == (champion, None)
        with pytest.raises(AssertionError):
            await made.ledger.withdraw(model, champion, "not so")


async def test_a_champion_stays_when_an_ancestor_is_withdrawn(rig: Rig) -> None:
    async with book(rig) as made:
        oldest, middle, champion = await made.crown(0, 1, 2)
        aside = await made.add(3, oldest)
        await made.ledger.withdraw(await made.model(), oldest, "bad")
        assert await made.states(oldest, middle, champion, aside) == ["withdrawn", "promoted", "promoted", "withdrawn"]
        model = await made.model()
        assert (model.champion, model.previous) == (champion, middle)


async def test_a_pause_holds_one_model(rig: Rig) -> None:
    async with book(rig) as made:
        await made.crown(0)
        await made.crown(0, model=OTHER)
        await made.ledger.pause(await made.model(), True)
        assert ((await made.model()).paused, (await made.model(OTHER)).paused) == (True, False)
        await made.ledger.pause(await made.model(), False)
        assert not (await made.model()).paused


async def test_what_an_operator_asks_for_keeps_the_candidates_progress(rig: Rig) -> None:
    async with book(rig) as made:
        candidate, skipped, other = [await made.add(step) for step in (0, 1, 2)]
        await made.ledger.adopt(await made.model(), candidate, (skipped,))
        for state in ("probing", "evaluating"):
            await made.ledger.request(await made.version(candidate), "force")
            found = await made.version(candidate)
            assert (found.state, found.request) == (state, "force")
            await made.ledger.probed(await made.model(), candidate, {})
        assert (await made.version(other)).request == ""
        await made.ledger.request(await made.version(skipped), "gate")
        found = await made.version(skipped)
        assert (found.state, found.request) == ("registered", "gate")
        await made.ledger.promote(await made.model(), candidate, "forced", {})
        assert (await made.version(candidate)).request == "", "it has had what was asked for"


async def test_each_model_that_was_touched_gets_its_routing(rig: Rig) -> None:
    async with book(rig) as made:
        (mine,) = await made.crown(0)
        (theirs,) = await made.crown(0, model=OTHER)
        routings = [event for event in await made.ledger.finish() if isinstance(event, Routing)]
        assert {routing.model: routing.champion for routing in routings} == {MODEL: mine, OTHER: theirs}
