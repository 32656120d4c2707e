"""Tests of the rows and events of each state change."""

from __future__ import annotations

import pytest

from headrace_registry.storage import rollout_store, store
from headrace_registry.storage.records import CHAMPION_IS_ANCHOR, TrialResult
from headrace_schemas import ModelEvent
from tests.unit.registry.conftest import NOBODY, OTHER, RegistryState
from tests.unit.registry.rig import MODEL


async def test_register_stores_a_version_once(registry: RegistryState) -> None:
    event, manifest = registry.checkpoint(3, base=NOBODY, parent=NOBODY)
    await registry.transition.register(event, manifest, None)
    assert registry.decisions() == [("registered", event.version, NOBODY)]
    record = await registry.version(event.version)
    assert (record.state, record.request, record.step, record.base, record.parent) == (
        "registered", "", 3, NOBODY, NOBODY,
    )  # fmt: skip
    assert (record.tokenizer_sha256, record.template_sha256) == ("a" * 64, "b" * 64)
    await registry.transition.register(event, None, "broken")
    assert registry.decisions() == []
    assert await registry.version(event.version) == record


async def test_register_rejects_a_version_with_a_problem(registry: RegistryState) -> None:
    parent = await registry.add(0)
    await registry.transition.withdraw(await registry.model(), parent, "bad")
    registry.decisions()
    event, _ = registry.checkpoint(1, parent=parent)
    await registry.transition.register(event, None, "damaged")
    assert registry.decisions() == [("rejected", event.version, None)]
    record = await registry.version(event.version)
    assert (record.state, record.base, record.tokenizer_sha256, record.template_sha256) == ("rejected", None, "", "")


async def test_register_keeps_the_roles_of_the_model(registry: RegistryState) -> None:
    await registry.promote_in_turn(0, 1)
    routings = await registry.routings()
    assert [routing.revision for routing in routings] == [0], "the first one"
    before = await registry.model()
    await registry.add(2)
    assert await registry.model() == before


async def test_register_withdraws_children_of_withdrawn_versions_only(registry: RegistryState) -> None:
    (champion,) = await registry.promote_in_turn(0)
    bad = await registry.add(1)
    await registry.transition.withdraw(await registry.model(), bad, "bad")
    registry.decisions()
    child = await registry.add(2, bad)
    assert registry.decisions() == [("registered", child, bad), ("withdrawn", child, champion)]
    for step, parent in enumerate((champion, NOBODY, None), start=3):
        name = await registry.add(step, parent)
        assert registry.decisions() == [("registered", name, parent)]
        assert await registry.states(name) == ["registered"]


async def test_adopt_skips_older_versions(registry: RegistryState) -> None:
    (champion,) = await registry.promote_in_turn(0)
    first, second, newest = [await registry.add(step) for step in (1, 2, 3)]
    registry.decisions()
    await registry.transition.adopt(await registry.model(), newest, (first, second))
    assert await registry.states(first, second, newest) == ["skipped", "skipped", "probing"]
    assert registry.decisions() == [("skipped", first, champion), ("skipped", second, champion)]
    assert (await registry.model()).candidate == newest


async def test_reject_clears_the_candidate_only_if_it_is_rejected(registry: RegistryState) -> None:
    previous, champion = await registry.promote_in_turn(0, 1)
    candidate, stranger = await registry.add(2), await registry.add(3)
    await registry.transition.adopt(await registry.model(), candidate, ())
    await registry.transition.reject(await registry.model(), stranger, "worse", {})
    assert (await registry.model()).candidate == candidate
    await registry.transition.reject(await registry.model(), candidate, "worse", {"score": 0.5})
    last = registry.transition.events[-1]
    assert isinstance(last, ModelEvent)
    assert last.statistics == {"score": 0.5}
    assert await registry.states(stranger, candidate) == ["rejected", "rejected"]
    await registry.transition.adopt(await registry.model(), previous, ())
    await registry.transition.reject(await registry.model(), previous, "worse", {})
    assert await registry.states(previous) == ["promoted"], "it may still take over again"
    model = await registry.model()
    assert (model.champion, model.previous, model.candidate) == (champion, previous, None)


async def test_roll_back_follows_the_promotions_backwards(registry: RegistryState) -> None:
    first, second, third = await registry.promote_in_turn(0, 1, 2)
    registry.decisions()
    await registry.transition.roll_back(await registry.model(), "users complain")
    model = await registry.model()
    assert (model.champion, model.previous) == (second, first)
    assert await registry.states(first, second, third) == ["promoted", "promoted", "withdrawn"]
    assert registry.decisions() == [("rolled_back", third, second)]
    await registry.transition.roll_back(model, "still")
    model = await registry.model()
    assert (model.champion, model.previous) == (first, None)


async def test_roll_back_never_makes_a_withdrawn_version_previous(registry: RegistryState) -> None:
    first, second, _ = await registry.promote_in_turn(0, 1, 2)
    await registry.transition.withdraw(await registry.model(), first, "bad")
    await registry.transition.roll_back(await registry.model(), "users complain")
    model = await registry.model()
    assert (model.champion, model.previous) == (second, None)


@pytest.mark.parametrize("descends", [True, False])
async def test_roll_back_clears_candidate_and_pin_that_descend_from_the_champion(
    registry: RegistryState, descends: bool
) -> None:
    _, champion = await registry.promote_in_turn(0, 1)
    candidate = await registry.add(2, champion if descends else None)
    pinned = await registry.add(3, candidate)
    await registry.transition.adopt(await registry.model(), candidate, ())
    await registry.transition.pin(await registry.model(), pinned)
    await registry.transition.roll_back(await registry.model(), "users complain")
    model = await registry.model()
    assert (model.candidate, model.pinned) == ((None, None) if descends else (candidate, pinned))
    assert await registry.states(candidate, pinned) == (["withdrawn"] * 2 if descends else ["probing", "registered"])


async def test_roll_back_clears_the_champions_pin_and_the_new_champions_candidacy(registry: RegistryState) -> None:
    previous, champion = await registry.promote_in_turn(0, 1)
    await registry.transition.adopt(await registry.model(), previous, ())
    await registry.transition.pin(await registry.model(), champion)
    await registry.transition.roll_back(await registry.model(), "users complain")
    model = await registry.model()
    assert (model.champion, model.candidate, model.pinned) == (previous, None, None)


async def test_roll_back_needs_champion_and_previous(registry: RegistryState) -> None:
    await registry.add(0)
    with pytest.raises(AssertionError):
        await registry.transition.roll_back(await registry.model(), "nothing there")
    await registry.promote_in_turn(1)
    with pytest.raises(AssertionError):
        await registry.transition.roll_back(await registry.model(), "nothing behind")


async def test_withdraw_includes_descendants_once_and_clears_their_roles(registry: RegistryState) -> None:
    (champion,) = await registry.promote_in_turn(0)
    bad = await registry.add(1, champion)
    withdrawn_child = await registry.add(2, bad)
    await registry.transition.withdraw(await registry.model(), withdrawn_child, "leaks")
    child, grandchild = await registry.add(3, bad), await registry.add(4, withdrawn_child)
    later = await registry.add(5, child)
    await registry.transition.adopt(await registry.model(), later, ())
    registry.decisions()
    await registry.transition.withdraw(await registry.model(), bad, "bad")
    assert registry.decisions() == [(("withdrawn"), name, champion) for name in (bad, child, later)]
    assert await registry.states(bad, withdrawn_child, child, grandchild, later) == ["withdrawn"] * 5
    model = await registry.model()
    assert (model.champion, model.candidate) == (champion, None)
    with pytest.raises(AssertionError):
        await registry.transition.withdraw(model, champion, "not so")


async def test_withdraw_of_an_ancestor_keeps_the_champion(registry: RegistryState) -> None:
    oldest, middle, champion = await registry.promote_in_turn(0, 1, 2)
    other_branch = await registry.add(3, oldest)
    await registry.transition.withdraw(await registry.model(), oldest, "bad")
    assert await registry.states(oldest, middle, champion, other_branch) == [
        "withdrawn",
        "promoted",
        "promoted",
        "withdrawn",
    ]
    model = await registry.model()
    assert (model.champion, model.previous) == (champion, middle)


async def test_begin_trial_counts_by_model(registry: RegistryState) -> None:
    await registry.promote_in_turn(0)
    await registry.promote_in_turn(0, model=OTHER)
    assert [await registry.transition.begin_trial(await registry.model()) for _ in range(2)] == [1, 2]
    assert ((await registry.model()).trials, (await registry.model(OTHER)).trials) == (2, 0)


async def test_trial_result_counts_once(registry: RegistryState) -> None:
    """The trial result is deleted by a promotion and by a rejection; the result of another version stays."""
    first, second, third = [await registry.add(step) for step in range(3)]
    result = TrialResult(None, None, True, "better", {}, CHAMPION_IS_ANCHOR)
    for name in (first, second, third):
        await registry.transition.record_trial_result(name, "gate", result)
    await registry.transition.promote(await registry.model(), first, "better", {})
    await registry.transition.reject(await registry.model(), second, "worse", {})
    assert [await store.trial_result(registry.tx, name, "gate") for name in (first, second, third)] == [
        None,
        None,
        result,
    ]


async def test_clear_roles_returns_the_candidate_to_waiting(registry: RegistryState) -> None:
    previous, champion = await registry.promote_in_turn(0, 1)
    candidate = await registry.add(2)
    await registry.transition.adopt(await registry.model(), candidate, ())
    await registry.transition.pin(await registry.model(), champion)
    for _ in range(2):  # the second time there is no candidate
        await registry.transition.clear_roles(await registry.model())
        model = await registry.model()
        assert (model.champion, model.previous, model.candidate, model.pinned) == (None, None, None, None)
        assert await registry.states(previous, champion, candidate) == ["promoted", "promoted", "registered"]


async def test_withdraw_ends_the_rollout_of_the_version(registry: RegistryState) -> None:
    """A rollout of another version continues."""
    await registry.promote_in_turn(0)
    first, second = await registry.roll_out(1), await registry.roll_out(2)
    await registry.transition.set_state(second, "held")
    assert [rollout.version for rollout in await rollout_store.rollouts_under_way(registry.tx, MODEL)] == [
        first,
        second,
    ]
    await registry.transition.withdraw(await registry.model(), first, "complaints")
    phases = {rollout.version: rollout.phase for rollout in await rollout_store.newest_rollouts(registry.tx, MODEL, 9)}
    assert phases == {first: "rolled_back", second: "canary"}


async def test_pause_affects_one_model(registry: RegistryState) -> None:
    await registry.promote_in_turn(0)
    await registry.promote_in_turn(0, model=OTHER)
    await registry.transition.pause(await registry.model(), True)
    assert ((await registry.model()).paused, (await registry.model(OTHER)).paused) == (True, False)
    await registry.transition.pause(await registry.model(), False)
    assert not (await registry.model()).paused


async def test_request_keeps_the_progress_of_the_candidate(registry: RegistryState) -> None:
    candidate, skipped, other = [await registry.add(step) for step in (0, 1, 2)]
    await registry.transition.adopt(await registry.model(), candidate, (skipped,))
    for state in ("probing", "evaluating"):
        await registry.transition.request(await registry.version(candidate), "force")
        record = await registry.version(candidate)
        assert (record.state, record.request) == (state, "force")
        await registry.transition.mark_probed(await registry.model(), candidate, {})
    assert (await registry.version(other)).request == ""
    await registry.transition.request(await registry.version(skipped), "gate")
    record = await registry.version(skipped)
    assert (record.state, record.request) == ("registered", "gate")
    await registry.transition.promote(await registry.model(), candidate, "forced", {})
    assert (await registry.version(candidate)).request == "", "it has had what was asked for"


async def test_finish_publishes_the_routing_of_each_changed_model(registry: RegistryState) -> None:
    (mine,) = await registry.promote_in_turn(0)
    (other_version,) = await registry.promote_in_turn(0, model=OTHER)
    routings = await registry.routings()
    assert {routing.model: routing.champion for routing in routings} == {MODEL: mine, OTHER: other_version}


async def test_record_decision_bounds_its_statistics(registry: RegistryState) -> None:
    version = await registry.add(0)
    numbers = {f"metric-{n:03d}.{'x' * 600}": float(n) for n in range(3)} | {f"n-{n}": float(n) for n in range(99)}
    numbers |= {"wealth": float("inf"), "nothing": float("nan")}
    registry.transition.events.clear()
    await registry.transition.record_decision(
        MODEL, version, "probed", "a \0 reason \ud83d", dict(reversed(numbers.items()))
    )
    (event,) = registry.transition.events
    assert isinstance(event, ModelEvent)
    assert ModelEvent.from_json(event.to_json()) == event
    assert [*event.statistics] == [f"n-{n}" for n in range(98, 34, -1)]
    assert event.reason == "a \ufffd reason \ufffd"
