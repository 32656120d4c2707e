"""What each change leaves in the tables, and which events it owes."""

from __future__ import annotations

import pytest

from headrace_registry import store
from headrace_registry.records import ALONE, TrialResult
from headrace_registry.rollouts import kept
from headrace_schemas import ModelEvent
from tests.unit.registry.rig import MODEL
from tests.unit.registry.transitions import NOBODY, OTHER, Book


async def test_a_version_is_kept_as_its_manifest_says_and_only_once(book: Book) -> None:
    event, manifest = book.checkpoint(3, base=NOBODY, parent=NOBODY)
    await book.transition.register(event, manifest, None)
    assert book.told() == [("registered", event.version, NOBODY)]
    found = await book.version(event.version)
    assert (found.state, found.request, found.step, found.base, found.parent) == (
        "registered", "", 3, NOBODY, NOBODY,
    )  # fmt: skip
    assert (found.tokenizer_sha256, found.template_sha256) == ("a" * 64, "b" * 64)
    await book.transition.register(event, None, "broken")
    assert book.told() == []
    assert await book.version(event.version) == found


async def test_what_has_a_problem_is_rejected_and_nothing_else_is_said_of_it(book: Book) -> None:
    parent = await book.add(0)
    await book.transition.withdraw(await book.model(), parent, "bad")
    book.told()
    event, _ = book.checkpoint(1, parent=parent)
    await book.transition.register(event, None, "damaged")
    assert book.told() == [("rejected", event.version, None)]
    found = await book.version(event.version)
    assert (found.state, found.base, found.tokenizer_sha256, found.template_sha256) == ("rejected", None, "", "")


async def test_a_model_stays_as_it_is_when_a_version_is_added(book: Book) -> None:
    await book.crown(0, 1)
    routings = await book.routings()
    assert [routing.revision for routing in routings] == [0], "the first one"
    before = await book.model()
    await book.add(2)
    assert await book.model() == before


async def test_only_the_children_of_what_is_withdrawn_are_withdrawn_at_once(book: Book) -> None:
    (champion,) = await book.crown(0)
    bad = await book.add(1)
    await book.transition.withdraw(await book.model(), bad, "bad")
    book.told()
    child = await book.add(2, bad)
    assert book.told() == [("registered", child, bad), ("withdrawn", child, champion)]
    for step, parent in enumerate((champion, NOBODY, None), start=3):
        name = await book.add(step, parent)
        assert book.told() == [("registered", name, parent)]
        assert await book.states(name) == ["registered"]


async def test_the_newest_is_adopted_and_the_others_are_skipped(book: Book) -> None:
    (champion,) = await book.crown(0)
    first, second, newest = [await book.add(step) for step in (1, 2, 3)]
    book.told()
    await book.transition.adopt(await book.model(), newest, (first, second))
    assert await book.states(first, second, newest) == ["skipped", "skipped", "probing"]
    assert book.told() == [("skipped", first, champion), ("skipped", second, champion)]
    assert (await book.model()).candidate == newest


async def test_a_rejected_candidate_makes_room_and_others_do_not(book: Book) -> None:
    previous, champion = await book.crown(0, 1)
    candidate, stranger = await book.add(2), await book.add(3)
    await book.transition.adopt(await book.model(), candidate, ())
    await book.transition.reject(await book.model(), stranger, "worse", {})
    assert (await book.model()).candidate == candidate
    await book.transition.reject(await book.model(), candidate, "worse", {"score": 0.5})
    last = book.transition.events[-1]
    assert isinstance(last, ModelEvent)
    assert last.statistics == {"score": 0.5}
    assert await book.states(stranger, candidate) == ["rejected", "rejected"]
    await book.transition.adopt(await book.model(), previous, ())
    await book.transition.reject(await book.model(), previous, "worse", {})
    assert await book.states(previous) == ["promoted"], "it may still take over again"
    model = await book.model()
    assert (model.champion, model.previous, model.candidate) == (champion, previous, None)


async def test_a_rollback_goes_back_the_way_that_promotions_came(book: Book) -> None:
    first, second, third = await book.crown(0, 1, 2)
    book.told()
    await book.transition.roll_back(await book.model(), "users complain")
    model = await book.model()
    assert (model.champion, model.previous) == (second, first)
    assert await book.states(first, second, third) == ["promoted", "promoted", "withdrawn"]
    assert book.told() == [("rolled_back", third, second)]
    await book.transition.roll_back(model, "still")
    model = await book.model()
    assert (model.champion, model.previous) == (first, None)


async def test_what_is_withdrawn_does_not_stand_behind_the_heir(book: Book) -> None:
    first, second, _ = await book.crown(0, 1, 2)
    await book.transition.withdraw(await book.model(), first, "bad")
    await book.transition.roll_back(await book.model(), "users complain")
    model = await book.model()
    assert (model.champion, model.previous) == (second, None)


@pytest.mark.parametrize("descends", [True, False])
async def test_a_rollback_takes_the_candidate_and_the_pin_that_descend_from_the_champion(
    book: Book, descends: bool
) -> None:
    _, champion = await book.crown(0, 1)
    candidate = await book.add(2, champion if descends else None)
    pinned = await book.add(3, candidate)
    await book.transition.adopt(await book.model(), candidate, ())
    await book.transition.pin(await book.model(), pinned)
    await book.transition.roll_back(await book.model(), "users complain")
    model = await book.model()
    assert (model.candidate, model.pinned) == ((None, None) if descends else (candidate, pinned))
    assert await book.states(candidate, pinned) == (["withdrawn"] * 2 if descends else ["probing", "registered"])


async def test_a_rollback_takes_the_pin_of_the_champion_and_the_heirs_candidacy(book: Book) -> None:
    previous, champion = await book.crown(0, 1)
    await book.transition.adopt(await book.model(), previous, ())
    await book.transition.pin(await book.model(), champion)
    await book.transition.roll_back(await book.model(), "users complain")
    model = await book.model()
    assert (model.champion, model.candidate, model.pinned) == (previous, None, None)


async def test_without_a_champion_or_a_previous_there_is_no_rollback(book: Book) -> None:
    await book.add(0)
    with pytest.raises(AssertionError):
        await book.transition.roll_back(await book.model(), "nothing there")
    await book.crown(1)
    with pytest.raises(AssertionError):
        await book.transition.roll_back(await book.model(), "nothing behind")


async def test_a_withdrawal_takes_all_descendants_once_and_their_roles(book: Book) -> None:
    (champion,) = await book.crown(0)
    bad = await book.add(1, champion)
    gone = await book.add(2, bad)
    await book.transition.withdraw(await book.model(), gone, "leaks")
    child, grandchild = await book.add(3, bad), await book.add(4, gone)
    later = await book.add(5, child)
    await book.transition.adopt(await book.model(), later, ())
    book.told()
    await book.transition.withdraw(await book.model(), bad, "bad")
    assert book.told() == [(("withdrawn"), name, champion) for name in (bad, child, later)]
    assert await book.states(bad, gone, child, grandchild, later) == ["withdrawn"] * 5
    model = await book.model()
    assert (model.champion, model.candidate) == (champion, None)
    with pytest.raises(AssertionError):
        await book.transition.withdraw(model, champion, "not so")


async def test_a_champion_stays_when_an_ancestor_is_withdrawn(book: Book) -> None:
    oldest, middle, champion = await book.crown(0, 1, 2)
    aside = await book.add(3, oldest)
    await book.transition.withdraw(await book.model(), oldest, "bad")
    assert await book.states(oldest, middle, champion, aside) == ["withdrawn", "promoted", "promoted", "withdrawn"]
    model = await book.model()
    assert (model.champion, model.previous) == (champion, middle)


async def test_each_model_counts_its_own_trials(book: Book) -> None:
    await book.crown(0)
    await book.crown(0, model=OTHER)
    assert [await book.transition.begin_trial(await book.model()) for _ in range(2)] == [1, 2]
    assert ((await book.model()).trials, (await book.model(OTHER)).trials) == (2, 0)


async def test_a_verdict_counts_once(book: Book) -> None:
    """Whatever comes of it; one on another version stays."""
    first, second, third = [await book.add(step) for step in range(3)]
    result = TrialResult(None, None, True, "better", {}, ALONE)
    for name in (first, second, third):
        await book.transition.tried(name, "gate", result)
    await book.transition.promote(await book.model(), first, "better", {})
    await book.transition.reject(await book.model(), second, "worse", {})
    assert [await store.trial_result(book.tx, name, "gate") for name in (first, second, third)] == [None, None, result]


async def test_a_model_that_is_vacated_has_no_roles_and_its_candidate_waits_again(book: Book) -> None:
    previous, champion = await book.crown(0, 1)
    candidate = await book.add(2)
    await book.transition.adopt(await book.model(), candidate, ())
    await book.transition.pin(await book.model(), champion)
    for _ in range(2):  # the second time there is no candidate
        await book.transition.vacate(await book.model())
        model = await book.model()
        assert (model.champion, model.previous, model.candidate, model.pinned) == (None, None, None, None)
        assert await book.states(previous, champion, candidate) == ["promoted", "promoted", "registered"]


async def test_what_is_withdrawn_is_taken_back_from_live_traffic(book: Book) -> None:
    """And a rollout of another version goes on."""
    await book.crown(0)
    first, second = await book.roll_out(1), await book.roll_out(2)
    await book.transition.set_state(second, "held")
    assert [one.version for one in await kept.under_way(book.tx, MODEL)] == [first, second]
    await book.transition.withdraw(await book.model(), first, "complaints")
    phases = {one.version: one.phase for one in await kept.newest(book.tx, MODEL, 9)}
    assert phases == {first: "rolled_back", second: "canary"}


async def test_a_pause_holds_one_model(book: Book) -> None:
    await book.crown(0)
    await book.crown(0, model=OTHER)
    await book.transition.pause(await book.model(), True)
    assert ((await book.model()).paused, (await book.model(OTHER)).paused) == (True, False)
    await book.transition.pause(await book.model(), False)
    assert not (await book.model()).paused


async def test_what_an_operator_asks_for_keeps_the_candidates_progress(book: Book) -> None:
    candidate, skipped, other = [await book.add(step) for step in (0, 1, 2)]
    await book.transition.adopt(await book.model(), candidate, (skipped,))
    for state in ("probing", "evaluating"):
        await book.transition.request(await book.version(candidate), "force")
        found = await book.version(candidate)
        assert (found.state, found.request) == (state, "force")
        await book.transition.probed(await book.model(), candidate, {})
    assert (await book.version(other)).request == ""
    await book.transition.request(await book.version(skipped), "gate")
    found = await book.version(skipped)
    assert (found.state, found.request) == ("registered", "gate")
    await book.transition.promote(await book.model(), candidate, "forced", {})
    assert (await book.version(candidate)).request == "", "it has had what was asked for"


async def test_each_model_that_was_touched_gets_its_routing(book: Book) -> None:
    (mine,) = await book.crown(0)
    (theirs,) = await book.crown(0, model=OTHER)
    routings = await book.routings()
    assert {routing.model: routing.champion for routing in routings} == {MODEL: mine, OTHER: theirs}


async def test_a_decision_keeps_the_numbers_that_its_event_has_room_for(book: Book) -> None:
    version = await book.add(0)
    numbers = {f"metric-{n:03d}.{'x' * 600}": float(n) for n in range(3)} | {f"n-{n}": float(n) for n in range(99)}
    numbers |= {"wealth": float("inf"), "nothing": float("nan")}
    book.transition.events.clear()
    await book.transition.decide(MODEL, version, "probed", "a \0 reason \ud83d", dict(reversed(numbers.items())))
    (event,) = book.transition.events
    assert isinstance(event, ModelEvent)
    assert ModelEvent.from_json(event.to_json()) == event
    assert [*event.statistics] == [f"n-{n}" for n in range(98, 34, -1)]
    assert event.reason == "a \ufffd reason \ufffd"
