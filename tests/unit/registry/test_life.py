"""Tests of the life of a version, from its checkpoint to champion or rejection."""

from __future__ import annotations

import pytest

from headrace_registry.gate.gate import GateFailed
from headrace_registry.versions.transition import Transition
from headrace_schemas import Routing
from tests.unit.registry.rig import EQUAL, MODEL, Rig, loaded


async def test_checkpoint_is_registered_and_loaded_without_an_alias(rig: Rig) -> None:
    version = await rig.checkpoint(0)
    assert rig.decided() == [("registered", version)]
    assert rig.sent(Routing) == []
    await rig.ticks()
    assert [served.version for served in rig.routing.serve] == [version]
    assert rig.routing.aliases == {}
    assert await rig.state(version) == "probing"


async def test_first_version_is_promoted_after_its_probe_and_audited(rig: Rig) -> None:
    version = await rig.checkpoint(0)
    rig.gate.scores[version] = {"t1": 0.0, "t2": 0.0, "a1": 1.0, "a2": 0.5}
    async with rig.running():
        await rig.until(lambda: ("evaluated", version) in rig.decided())
    assert rig.decided() == [(d, version) for d in ("registered", "probed", "promoted", "evaluated")]
    assert rig.routing.aliases == {"champion": version}
    assert rig.last("probed").statistics == {"replicas": 1, "max_abs_delta": 0.001, "parent_max_abs_delta": 0.5}
    assert "nothing to compare with" in (rig.last("promoted").reason or "")
    error = pytest.approx((4 * 0.25**2 / 3 / 4) ** 0.5)
    assert rig.last("evaluated").statistics == {"score": 0.75, "tasks": 4, "score_standard_error": error}
    assert rig.gate.runs == [{version}], "it is measured once"
    assert [call[1:] for call in rig.gate.requests] == [("a1", 0), ("a2", 1), ("a1", 2), ("a2", 3)]


async def test_promotion_by_trial_publishes_its_statistics(rig: Rig) -> None:
    (old,) = await rig.promote_in_turn(0)
    new = await rig.checkpoint(1, parent=old)
    rig.gate.scores[new] = {"t1": 0.75, "t2": 0.75, "a1": 0.5, "a2": 0.25}
    async with rig.running():
        await rig.until(lambda: ("evaluated", new) in rig.decided())
    assert rig.decided()[-4:] == [(d, new) for d in ("registered", "probed", "promoted", "evaluated")]
    promoted = rig.last("promoted")
    assert promoted.previous == old
    assert promoted.reason == f"not inferior to {old}"
    numbers = dict(promoted.statistics)
    tasks = numbers.pop("tasks")
    assert numbers == {
        "plays": 2 * tasks, "trial": 1, "alpha": pytest.approx(0.02), "beta": 0.05,
        "difference": 0.25, "standard_error": 0.0, "margin": 0.25,
    }  # fmt: skip
    assert "score" not in promoted.statistics, "what has chosen is not reported"
    assert rig.last("evaluated").statistics["score"] == 0.375
    assert rig.routing.aliases == {"champion": new, "previous": old}
    assert [served.version for served in rig.routing.serve] == [new, old]
    assert rig.gate.runs == [{old}, {new, old}, {new}], "audit, trial, audit"


async def test_trial_plays_equal_tasks_and_seeds_with_all_versions(rig: Rig) -> None:
    (old,) = await rig.promote_in_turn(0)
    new = await rig.checkpoint(1, parent=old)
    async with rig.running():
        await rig.until(lambda: ("promoted", new) in rig.decided())
    drawn = {
        name: [call[1:] for call in rig.gate.requests if call[0] == name and call[1] in "t1 t2"] for name in (old, new)
    }
    assert drawn[old] == drawn[new] != []
    assert {task for task, _ in drawn[new]} == {"t1", "t2"}
    assert len({seed for _, seed in drawn[new]}) == len(drawn[new])


async def test_gate_program_is_started_ahead_while_replicas_load_and_after_each_run(rig: Rig) -> None:
    (old,) = await rig.promote_in_turn(0)
    rig.gate.prepared.clear()
    before = len(rig.gate.runs)
    new = await rig.checkpoint(1, parent=old)
    async with rig.running():
        await rig.until(lambda: before + 2 in rig.gate.prepared)
    assert ("evaluated", new) in rig.decided(), "the second run was the audit"
    assert rig.gate.prepared[0] == before, "before the trial has begun"


async def test_inferior_candidate_is_rejected_and_unloaded(rig: Rig) -> None:
    (old,) = await rig.promote_in_turn(0)
    new = await rig.checkpoint(1)
    rig.gate.scores[new] = {"t1": 0.25, "t2": 0.0}
    async with rig.running():
        await rig.until(lambda: ("rejected", new) in rig.decided())
    rejected = rig.last("rejected")
    assert rejected.reason == f"inferior to {old}"
    assert rejected.statistics["difference"] < -0.25
    assert rig.routing.aliases == {"champion": old}
    assert [served.version for served in rig.routing.serve] == [old]
    assert await rig.state(new) == "rejected"


async def test_undecided_candidate_is_rejected_with_the_reason(rig: Rig) -> None:
    (old,) = await rig.promote_in_turn(0)
    gate = rig.settings.gate.model_copy(update={"tasks_max": 3})
    rig.settings = rig.settings.model_copy(update={"gate": gate})
    await reboot(rig)
    new = await rig.checkpoint(1)
    async with rig.running():
        await rig.until(lambda: ("rejected", new) in rig.decided())
    reason = f"undecided after 3 tasks (gate.tasks_max): not shown to be better than {old} - 0.25"
    assert rig.last("rejected").reason == reason
    assert len([call for call in rig.gate.requests if call[0] == new]) == 3, "no play beyond the last task"


async def test_rejected_version_gets_another_trial_on_request(rig: Rig) -> None:
    (old,) = await rig.promote_in_turn(0)
    new = await rig.checkpoint(1)
    rig.gate.scores[new] = {"t1": 0.0, "t2": 0.0}
    async with rig.running():
        await rig.until(lambda: ("rejected", new) in rig.decided())
        rig.gate.scores[new] = EQUAL
        record = await rig.record(new)
        async with rig.database.transaction() as tx:
            await Transition(tx, rig.clock.now()).request(record, "gate")
        rig.model_controller.wake.set()
        await rig.until(lambda: ("promoted", new) in rig.decided())
    assert rig.last("promoted").statistics["trial"] == 2
    assert rig.gate.runs[1:3] == [{old, new}, {old, new}]


async def test_failed_probe_rejects_with_the_replicas_error(rig: Rig) -> None:
    (old,) = await rig.promote_in_turn(0)
    new = await rig.checkpoint(1)
    await rig.ticks()
    rig.clock.elapsed_s += 1
    rig.report("r1", loaded(old), loaded(new, "failed", error="model.safetensors: digest differs"))
    await rig.ticks()
    assert rig.last("rejected").reason == "replica r1: model.safetensors: digest differs"
    assert rig.gate.runs == [{old}]


async def test_candidate_waits_for_a_lagging_replica(rig: Rig) -> None:
    version = await rig.checkpoint(0)
    await rig.ticks()
    rig.follow("r1")
    rig.report("r2", loaded(version, "loading"))
    await rig.ticks()
    assert await rig.state(version) == "probing"
    rig.follow("r2")
    await rig.ticks()
    assert await rig.state(version) == "promoted"


async def test_probe_times_out_on_live_replicas(rig: Rig) -> None:
    version = await rig.checkpoint(0)
    await rig.ticks()
    rig.clock.elapsed_s += 10_000  # nobody is there: nobody is to blame
    await rig.ticks()
    assert await rig.state(version) == "probing"
    for _ in range(10):
        rig.report("r1", loaded(version, "loading"))
        await rig.ticks()
        assert await rig.state(version) == "probing"
        rig.clock.elapsed_s += rig.settings.probe_timeout_s / 10
    rig.clock.elapsed_s += 1
    rig.report("r1", loaded(version, "loading"))
    await rig.ticks()
    assert rig.last("rejected").reason == "not ready in time: replica r1: loading"


async def test_failed_gate_run_is_retried_and_then_rejects(rig: Rig) -> None:
    (old,) = await rig.promote_in_turn(0)
    new = await rig.checkpoint(1)
    rig.gate.scores[new] = GateFailed("status 1: boom")
    async with rig.running():
        await rig.until(lambda: ("rejected", new) in rig.decided())
    assert rig.last("rejected").reason == "the gate failed: status 1: boom"
    assert rig.gate.runs == [{old}, {old, new}, {old, new}]
    assert (await rig.model()).trials == 2, "what a trial may have shown is spent, also when it failed"
    assert rig.routing.aliases == {"champion": old}


async def test_failed_audit_is_not_retried_for_ever(rig: Rig) -> None:
    version = await rig.checkpoint(0)
    rig.gate.scores[version] = GateFailed("boom")
    async with rig.running():
        await rig.until(lambda: version in rig.model_controller._runner.audits.failed)
    rig.follow()
    await rig.ticks(5)
    assert rig.gate.runs == [{version}, {version}]
    new = await rig.checkpoint(1)
    rig.gate.scores[version] = EQUAL
    async with rig.running():
        await rig.until(lambda: ("promoted", new) in rig.decided())
    assert rig.gate.runs[2:4] == [{version}, {version, new}], "the champion gets another chance with the next candidate"


async def test_gate_failure_on_the_champion_promotes_no_version(rig: Rig) -> None:
    (old,) = await rig.promote_in_turn(0)
    rig.gate.scores[old] = GateFailed("boom")
    new = await rig.checkpoint(1)
    async with rig.running():
        await rig.until(lambda: ("rejected", new) in rig.decided())
    assert rig.last("rejected").reason == "the gate failed: boom"


async def test_changed_gate_audits_the_champion_again(rig: Rig) -> None:
    (old,) = await rig.promote_in_turn(0)
    rig.gate.sha256 = "another gate"
    async with rig.running():
        await rig.until(lambda: rig.decided().count(("evaluated", old)) == 2)
    assert rig.gate.runs == [{old}, {old}]


async def test_trial_waits_for_a_champion_that_is_loading(rig: Rig) -> None:
    (old,) = await rig.promote_in_turn(0)
    new = await rig.checkpoint(1)
    await rig.ticks()
    rig.clock.elapsed_s += 1
    rig.report("r1", loaded(new), loaded(old, "loading"))
    await rig.ticks()
    assert await rig.state(new) == "evaluating"
    assert rig.gate.runs == [{old}]
    async with rig.running():
        await rig.until(lambda: ("promoted", new) in rig.decided())


async def test_unservable_champion_does_not_block_candidates(rig: Rig) -> None:
    (old,) = await rig.promote_in_turn(0)
    new = await rig.checkpoint(1)
    await rig.ticks()
    rig.clock.elapsed_s += 1
    rig.report("r1", loaded(new), loaded(old, "failed", error="no memory"))
    await rig.ticks()
    assert rig.last("promoted").version == new
    assert rig.last("promoted").reason == f"no replica can serve the champion {old}: nothing to compare with"


async def test_promotion_without_a_gate_states_so_in_its_event(rig: Rig) -> None:
    rig.gate.configured = False
    async with rig.running():
        first = await rig.checkpoint(0)
        await rig.until(lambda: ("promoted", first) in rig.decided())
        second = await rig.checkpoint(1)
        await rig.until(lambda: ("promoted", second) in rig.decided())
    assert rig.gate.runs == []
    assert rig.last("promoted").reason == "promoted after its probe: gate.command is empty"


async def test_newest_waiting_version_is_evaluated_and_others_skipped(rig: Rig) -> None:
    (old,) = await rig.promote_in_turn(0)
    waiting = [await rig.checkpoint(step) for step in (1, 2, 3)]
    async with rig.running():
        await rig.until(lambda: ("promoted", waiting[2]) in rig.decided())
    assert [await rig.state(version) for version in waiting] == ["skipped", "skipped", "promoted"]
    assert [d for d in rig.decided() if d[0] == "skipped"] == [("skipped", version) for version in waiting[:2]]
    assert rig.gate.runs[:2] == [{old}, {old, waiting[2]}]


async def test_candidate_in_a_trial_is_not_replaced_by_a_newer_version(rig: Rig) -> None:
    (old,) = await rig.promote_in_turn(0)
    rig.gate.open.clear()
    first = await rig.checkpoint(1)
    async with rig.running():
        await rig.until(lambda: rig.gate.runs == [{old}, {old, first}])
        second = await rig.checkpoint(2)
        rig.gate.open.set()
        await rig.until(lambda: ("promoted", second) in rig.decided())
    assert await rig.state(first) == "promoted"
    assert rig.gate.cancelled == []
    assert rig.routing.aliases == {"champion": second, "previous": first}


async def test_model_read_from_history_starts_with_its_base(rig: Rig) -> None:
    versions = [await rig.checkpoint(step) for step in (0, 1, 2)]
    async with rig.running():
        await rig.until(lambda: ("promoted", versions[2]) in rig.decided())
    assert [await rig.state(version) for version in versions] == ["promoted", "skipped", "promoted"]


@pytest.mark.parametrize(("score", "decision"), [(0.75, "promoted"), (0.25, "rejected")])
async def test_minimum_score_applies_without_a_champion(rig: Rig, score: float, decision: str) -> None:
    gate = rig.settings.gate.model_copy(update={"minimum_score": 0.6})
    rig.settings = rig.settings.model_copy(update={"gate": gate})
    await reboot(rig)
    version = await rig.checkpoint(7)
    rig.gate.scores[version] = {"t1": score, "t2": score}
    async with rig.running():
        await rig.until(lambda: (decision, version) in rig.decided())
    assert "inferior to gate.minimum_score = 0.6" in (rig.last(decision).reason or "")
    numbers = rig.last(decision).statistics
    assert numbers["minimum_score"] == 0.6
    assert numbers["minimum_difference"] == pytest.approx(score - 0.6)
    assert numbers["minimum_margin"] == gate.margin


async def reboot(rig: Rig) -> None:
    rig.boot()
    await rig.lease.acquire()


async def test_version_with_another_tokenizer_is_rejected(rig: Rig) -> None:
    await rig.promote_in_turn(0)
    other = await rig.checkpoint(1, tokenizer="c")
    await rig.ticks()
    assert "tokenizer differs" in (rig.last("rejected").reason or "")
    assert await rig.state(other) == "rejected"


async def test_adapter_is_served_with_its_base(rig: Rig) -> None:
    (base,) = await rig.promote_in_turn(0)
    async with rig.running():
        for step in (1, 2, 3):
            adapter = await rig.checkpoint(step, base=base)
            await rig.until(lambda adapter=adapter: ("promoted", adapter) in rig.decided())  # type: ignore[misc]
    assert [served.version for served in rig.routing.serve] == [base, adapter, rig.routing.aliases["previous"]]


async def test_adapter_without_its_base_is_rejected(rig: Rig) -> None:
    await rig.promote_in_turn(0)
    await rig.checkpoint(1, base="m@0123456789ab")
    await rig.ticks()
    assert rig.last("rejected").reason == "its base m@0123456789ab is not registered"


async def test_champion_refused_by_all_replicas_is_rolled_back(rig: Rig) -> None:
    old, new = await rig.promote_in_turn(0, 1)
    rig.report("r1", loaded(old), loaded(new, "failed", error="no memory"))
    await rig.ticks()
    assert rig.routing.aliases == {"champion": old}
    assert rig.routing.withdrawn == (new,)
    assert rig.last("rolled_back").reason == "no replica can serve it: no memory"


async def test_champion_served_by_some_replica_stays(rig: Rig) -> None:
    old, new = await rig.promote_in_turn(0, 1)
    rig.report("r1", loaded(old), loaded(new, "failed", error="no memory"))
    rig.report("r2", loaded(old), loaded(new))
    await rig.ticks()
    assert rig.routing.aliases == {"champion": new, "previous": old}


async def test_routing_revisions_grow_by_one_with_complete_tables(rig: Rig) -> None:
    await rig.promote_in_turn(0, 1, 2)
    routings = rig.sent(Routing)
    assert [routing.revision for routing in routings] == list(range(len(routings)))
    for routing in routings:
        assert routing.key == MODEL
        served = {version.version for version in routing.serve}
        assert set(routing.aliases.values()) <= served
        assert len(served) <= 3
