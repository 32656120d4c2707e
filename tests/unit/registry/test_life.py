"""The life of a version, from its checkpoint to champion or rejection."""

from __future__ import annotations

import pytest

from headrace_registry.gate import GateFailed
from headrace_schemas import Routing
from tests.unit.registry.rig import EQUAL, MODEL, Rig, loaded


async def test_a_checkpoint_is_registered_and_put_into_serve_but_gets_no_alias(rig: Rig) -> None:
    version = await rig.checkpoint(0)
    assert rig.decided() == [("registered", version)]
    assert rig.sent(Routing) == []
    await rig.ticks()
    assert [served.version for served in rig.routing.serve] == [version]
    assert rig.routing.aliases == {}
    assert await rig.state(version) == "probing"


async def test_the_first_version_serves_after_its_probe_and_its_score_is_the_baseline(rig: Rig) -> None:
    version = await rig.checkpoint(0)
    rig.gate.scores[version] = {"t1": 1.0, "t2": 0.5}
    async with rig.running():
        await rig.until(lambda: ("evaluated", version) in rig.decided())
    assert rig.decided() == [(d, version) for d in ("registered", "probed", "promoted", "evaluated")]
    assert rig.routing.aliases == {"champion": version}
    assert rig.last("probed").statistics == {"replicas": 1, "max_abs_delta": 0.001, "parent_max_abs_delta": 0.5}
    assert "nothing to compare with" in (rig.last("promoted").reason or "")
    assert rig.last("evaluated").statistics == {"score": 0.75, "tasks": 2}
    assert rig.gate.played == [version], "the baseline is measured once"


async def test_promotion_by_paired_comparison_with_all_numbers(rig: Rig) -> None:
    (old,) = await rig.crowned(0)
    new = await rig.checkpoint(1, parent=old)
    rig.gate.scores[new] = {"t1": 0.75, "t2": 0.25}
    async with rig.running():
        await rig.until(lambda: ("promoted", new) in rig.decided())
    assert rig.decided()[-4:] == [(d, new) for d in ("registered", "probed", "evaluated", "promoted")]
    promoted = rig.last("promoted")
    assert promoted.previous == old
    assert promoted.statistics == {
        "score": 0.5, "champion_score": 0.5, "difference": 0.0, "standard_error": 0.25, "tasks": 2, "margin": 0.05,
    }  # fmt: skip
    assert rig.routing.aliases == {"champion": new, "previous": old}
    assert [served.version for served in rig.routing.serve] == [new, old]
    assert rig.gate.played == [old, new], "the champion's recorded scores are used"


async def test_an_inferior_candidate_is_rejected_and_dropped(rig: Rig) -> None:
    (old,) = await rig.crowned(0)
    new = await rig.checkpoint(1)
    rig.gate.scores[new] = {"t1": 0.5, "t2": 0.375}
    async with rig.running():
        await rig.until(lambda: ("rejected", new) in rig.decided())
    rejected = rig.last("rejected")
    assert rejected.reason == f"inferior to {old}"
    assert rejected.statistics["difference"] == -0.0625
    assert rig.routing.aliases == {"champion": old}
    assert [served.version for served in rig.routing.serve] == [old]
    assert await rig.state(new) == "rejected"


async def test_a_failed_probe_rejects_with_the_replicas_error(rig: Rig) -> None:
    (old,) = await rig.crowned(0)
    new = await rig.checkpoint(1)
    await rig.ticks()
    rig.clock.elapsed_s += 1
    rig.say("r1", loaded(old), loaded(new, "failed", error="model.safetensors: digest differs"))
    await rig.ticks()
    assert rig.last("rejected").reason == "replica r1: model.safetensors: digest differs"
    assert rig.gate.played == [old]


async def test_a_second_replica_that_lags_holds_the_candidate_back(rig: Rig) -> None:
    version = await rig.checkpoint(0)
    await rig.ticks()
    rig.follow("r1")
    rig.say("r2", loaded(version, "loading"))
    await rig.ticks()
    assert await rig.state(version) == "probing"
    rig.follow("r2")
    await rig.ticks()
    assert await rig.state(version) == "promoted"


async def test_live_replicas_have_a_bounded_time(rig: Rig) -> None:
    version = await rig.checkpoint(0)
    await rig.ticks()
    rig.clock.elapsed_s += 10_000  # nobody is there: nobody is to blame
    await rig.ticks()
    assert await rig.state(version) == "probing"
    for _ in range(10):
        rig.say("r1", loaded(version, "loading"))
        await rig.ticks()
        assert await rig.state(version) == "probing"
        rig.clock.elapsed_s += rig.settings.probe_timeout_s / 10
    rig.clock.elapsed_s += 1
    rig.say("r1", loaded(version, "loading"))
    await rig.ticks()
    assert rig.last("rejected").reason == "not ready in time: replica r1: loading"


async def test_the_gate_is_tried_again_and_then_rejects(rig: Rig) -> None:
    (old,) = await rig.crowned(0)
    new = await rig.checkpoint(1)
    rig.gate.scores[new] = GateFailed("status 1: boom")
    async with rig.running():
        await rig.until(lambda: ("rejected", new) in rig.decided())
    assert rig.last("rejected").reason == "the gate failed: status 1: boom"
    assert rig.gate.played == [old, new, new]
    assert rig.routing.aliases == {"champion": old}


async def test_a_baseline_that_fails_is_not_tried_for_ever(rig: Rig) -> None:
    version = await rig.checkpoint(0)
    rig.gate.scores[version] = GateFailed("boom")
    async with rig.running():
        await rig.until(lambda: len(rig.gate.played) == 2)
        await rig.ticks(0)
    rig.follow()
    await rig.ticks(5)
    assert rig.gate.played == [version, version]
    new = await rig.checkpoint(1)
    rig.gate.scores[version] = EQUAL
    async with rig.running():
        await rig.until(lambda: ("promoted", new) in rig.decided())
    assert rig.gate.played[2:] == [new, version], "the champion gets another chance with the next candidate"


async def test_no_comparison_when_the_champion_cannot_be_measured(rig: Rig) -> None:
    (old,) = await rig.crowned(0)
    rig.gate.sha256 = "another gate"
    rig.gate.scores[old] = GateFailed("boom")
    new = await rig.checkpoint(1)
    async with rig.running():
        await rig.until(lambda: ("rejected", new) in rig.decided())
    assert rig.last("rejected").reason == f"the gate failed on the champion {old}: boom"


async def test_tasks_that_changed_make_the_champion_play_again(rig: Rig) -> None:
    (old,) = await rig.crowned(0)
    new = await rig.checkpoint(1)
    rig.clock.elapsed_s += 1
    rig.gate.scores |= {old: {"t1": 0.25, "t3": 0.25}, new: {"t1": 0.25, "t3": 0.75}}
    async with rig.running():
        await rig.until(lambda: ("promoted", new) in rig.decided())
    assert rig.gate.played == [old, new, old]
    assert rig.last("promoted").statistics["champion_score"] == 0.25


async def test_tasks_that_the_candidate_lacks_are_not_left_out(rig: Rig) -> None:
    (old,) = await rig.crowned(0)
    new = await rig.checkpoint(1)
    rig.clock.elapsed_s += 1
    rig.gate.scores[new] = {"t1": 1.0}

    def later() -> bool:
        rig.clock.elapsed_s += 0.001
        return ("rejected", new) in rig.decided()

    async with rig.running():
        await rig.until(later)
    assert rig.last("rejected").reason == f"cannot be compared with {old}: 1 tasks were scored for one version only"


async def test_without_a_gate_the_probe_decides_and_the_event_says_so(rig: Rig) -> None:
    rig.gate.configured = False
    async with rig.running():
        first = await rig.checkpoint(0)
        await rig.until(lambda: ("promoted", first) in rig.decided())
        second = await rig.checkpoint(1)
        await rig.until(lambda: ("promoted", second) in rig.decided())
    assert rig.gate.played == []
    assert rig.last("promoted").reason == "promoted after its probe: gate.command is empty"


async def test_only_the_newest_of_those_that_wait_is_evaluated(rig: Rig) -> None:
    (old,) = await rig.crowned(0)
    waiting = [await rig.checkpoint(step) for step in (1, 2, 3)]
    async with rig.running():
        await rig.until(lambda: ("promoted", waiting[2]) in rig.decided())
    assert [await rig.state(version) for version in waiting] == ["skipped", "skipped", "promoted"]
    assert [d for d in rig.decided() if d[0] == "skipped"] == [("skipped", version) for version in waiting[:2]]
    assert rig.gate.played == [old, waiting[2]]


async def test_a_candidate_at_the_gate_is_not_dropped_for_a_newer_one(rig: Rig) -> None:
    (old,) = await rig.crowned(0)
    rig.gate.open.clear()
    first = await rig.checkpoint(1)
    async with rig.running():
        await rig.until(lambda: rig.gate.played == [old, first])
        second = await rig.checkpoint(2)
        rig.gate.open.set()
        await rig.until(lambda: ("promoted", second) in rig.decided())
    assert await rig.state(first) == "promoted"
    assert rig.gate.cancelled == []
    assert rig.routing.aliases == {"champion": second, "previous": first}


async def test_a_model_read_from_its_history_starts_with_its_base(rig: Rig) -> None:
    versions = [await rig.checkpoint(step) for step in (0, 1, 2)]
    async with rig.running():
        await rig.until(lambda: ("promoted", versions[2]) in rig.decided())
    assert [await rig.state(version) for version in versions] == ["promoted", "skipped", "promoted"]


@pytest.mark.parametrize(("score", "decision"), [(0.75, "promoted"), (0.5, "rejected")])
async def test_the_minimum_holds_for_a_model_without_champion_too(rig: Rig, score: float, decision: str) -> None:
    gate = rig.settings.gate.model_copy(update={"minimum_score": 0.6})
    rig.settings = rig.settings.model_copy(update={"gate": gate})
    rig.boot()
    await rig.lease.acquire()
    version = await rig.checkpoint(7)
    rig.gate.scores[version] = {"t": score}
    async with rig.running():
        await rig.until(lambda: (decision, version) in rig.decided())
    assert rig.last(decision).statistics["score"] == score


async def test_another_tokenizer_is_refused(rig: Rig) -> None:
    await rig.crowned(0)
    other = await rig.checkpoint(1, tokenizer="c")
    await rig.ticks()
    assert "tokenizer differs" in (rig.last("rejected").reason or "")
    assert await rig.state(other) == "rejected"


async def test_an_adapter_is_served_with_its_base(rig: Rig) -> None:
    (base,) = await rig.crowned(0)
    async with rig.running():
        for step in (1, 2, 3):
            adapter = await rig.checkpoint(step, base=base)
            await rig.until(lambda adapter=adapter: ("promoted", adapter) in rig.decided())  # type: ignore[misc]
    assert [served.version for served in rig.routing.serve] == [base, adapter, rig.routing.aliases["previous"]]


async def test_an_adapter_without_its_base_is_refused(rig: Rig) -> None:
    await rig.crowned(0)
    await rig.checkpoint(1, base="m@0123456789ab")
    await rig.ticks()
    assert rig.last("rejected").reason == "its base m@0123456789ab is not registered"


async def test_a_champion_that_every_replica_refuses_makes_room_for_the_previous_one(rig: Rig) -> None:
    old, new = await rig.crowned(0, 1)
    rig.say("r1", loaded(old), loaded(new, "failed", error="no memory"))
    await rig.ticks()
    assert rig.routing.aliases == {"champion": old}
    assert rig.routing.withdrawn == (new,)
    assert rig.last("rolled_back").reason == "no replica can serve it: no memory"


async def test_a_champion_that_some_replica_serves_stays(rig: Rig) -> None:
    old, new = await rig.crowned(0, 1)
    rig.say("r1", loaded(old), loaded(new, "failed", error="no memory"))
    rig.say("r2", loaded(old), loaded(new))
    await rig.ticks()
    assert rig.routing.aliases == {"champion": new, "previous": old}


async def test_revisions_grow_by_one_and_every_table_is_whole(rig: Rig) -> None:
    await rig.crowned(0, 1, 2)
    routings = rig.sent(Routing)
    assert [routing.revision for routing in routings] == list(range(len(routings)))
    for routing in routings:
        assert routing.key == MODEL
        served = {version.version for version in routing.serve}
        assert set(routing.aliases.values()) <= served
        assert len(served) <= 3
