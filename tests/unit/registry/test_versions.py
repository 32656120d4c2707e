"""Tests of checkpoints, probes, routings, pins and pauses.

Checkpoints may be valid, repeated, damaged or contradictory. A probe counts only if it passed on every live replica.
The routing on the bus equals that of the database, or is published again. Pins and pauses stop changes of a model.
"""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path

import pytest

from headrace_registry.versions import probe
from headrace_registry.versions.routing import Reconciler
from headrace_runtime.errors import CorruptBlob
from headrace_schemas import Checkpoint, LoadedVersion, Replica, Routing
from headrace_schemas.http.registry_api import ModelState
from headrace_schemas.values.blobs import BlobRef
from tests.unit.registry.rig import MODEL, START, Rig, loaded
from tests.unit.registry.test_api import client, error


def damage(ref: BlobRef) -> None:
    Path(ref.uri.removeprefix("file://")).write_bytes(b"garbage")


async def publish(rig: Rig, version: str, manifest: BlobRef, *, step: int = 0, lineage: str = "main") -> None:
    event = Checkpoint(
        time=rig.clock.now(), model=MODEL, version=version, lineage=lineage, step=step, manifest=manifest
    )
    await rig.receive(event.to_json())


async def test_checkpoint_handler_registers_a_repeated_checkpoint_once(rig: Rig) -> None:
    version = await rig.checkpoint(0)
    assert await rig.checkpoint(0) == version
    assert rig.decided() == [("registered", version)]


async def test_checkpoint_handler_never_changes_a_registered_version(rig: Rig) -> None:
    (champion,) = await rig.promote_in_turn(0)
    before = await rig.record(champion)
    _, other = rig.manifest(9)
    await publish(rig, champion, other, lineage="evil")
    assert await rig.record(champion) == before


async def test_invalid_checkpoint_is_dead_lettered_and_the_next_registered(rig: Rig) -> None:
    await rig.receive(b"{not json")
    await rig.receive(b'{"model": "m"}')
    version = await rig.checkpoint(0)
    assert [letter.reason for letter in rig.dead_letters] == ["invalid_json", "invalid_event"]
    assert rig.decided() == [("registered", version)]


async def test_checkpoint_handler_rejects_a_manifest_of_another_version(rig: Rig) -> None:
    manifest, ref = rig.manifest(0)
    claimed = f"{MODEL}@{'0' * 16}"
    await publish(rig, claimed, ref)
    assert rig.last("rejected").reason == f"its manifest is that of {manifest.version}"
    assert await rig.state(claimed) == "rejected"


async def test_checkpoint_handler_rejects_a_contradicting_manifest(rig: Rig) -> None:
    manifest, ref = rig.manifest(0)
    await publish(rig, manifest.version, ref, step=5)
    assert rig.last("rejected").reason == "its manifest has another lineage, step or parent than the checkpoint"


async def test_checkpoint_handler_rejects_a_damaged_manifest(rig: Rig) -> None:
    manifest, ref = rig.manifest(0)
    damage(ref)
    await publish(rig, manifest.version, ref)
    assert "do not hash to" in (rig.last("rejected").reason or "")


async def test_checkpoint_handler_rejects_a_file_that_is_not_a_manifest(rig: Rig) -> None:
    await publish(rig, f"{MODEL}@{'0' * 16}", rig.blobs.put(b"{}"))
    assert "is not a manifest" in (rig.last("rejected").reason or "")
    assert CorruptBlob.__name__ not in (rig.last("rejected").reason or "")


async def test_checkpoint_handler_rejects_a_missing_manifest_at_once(rig: Rig) -> None:
    manifest, ref = rig.manifest(0)
    rig.blobs.delete(ref)
    await publish(rig, manifest.version, ref)
    assert "its manifest does not exist" in (rig.last("rejected").reason or "")


V = "m@0123456789ab"


def replica(name: str, *versions: LoadedVersion, at_s: float = 0, stopping: bool = False) -> Replica:
    return Replica(
        time=START + timedelta(seconds=at_s),
        replica_id=name,
        url="http://x",
        engine="fake",
        versions=versions,
        capacity=1,
        ttl_s=10,
        started_at=START,
        stopping=stopping,
    )


def test_live_replicas_leave_out_silent_and_stopping_replicas() -> None:
    replicas = [replica("fresh", at_s=5), replica("silent", at_s=-6), replica("leaving", at_s=5, stopping=True)]
    assert [
        live_replica.replica_id for live_replica in probe.live_replicas(replicas, START + timedelta(seconds=5))
    ] == ["fresh"]


def test_unserved_reason_has_each_replicas_reason() -> None:
    refused = replica("a", loaded(V, "failed", error="no memory"))
    unprobed = replica("b", loaded(V, passed=False, error="probe refused"))
    waiting = replica("c", LoadedVersion(version=V, state="loading", error="disk: 1.0 MB are free on /data"))
    reason = "replica a: no memory; replica b: probe refused; replica c: loading: disk: 1.0 MB are free on /data"
    assert probe.unserved_reason(V, [refused, unprobed, waiting]) == reason
    assert probe.unserved_reason(V, [refused, replica("d", loaded(V))]) is None
    assert probe.unserved_reason(V, [replica("e")]) == "replica e: not loaded yet"
    assert probe.unserved_reason(V, []) == "no replica is alive"


def test_probe_result_passes_when_all_replicas_are_ready() -> None:
    result = probe.probe_result(V, [replica("a", loaded(V)), replica("b", loaded(V))])
    assert result.state == "passed"
    assert result.statistics == {"replicas": 2.0, "max_abs_delta": 0.001, "parent_max_abs_delta": 0.5}


@pytest.mark.parametrize(
    ("versions", "state", "reason"),
    [
        ((), "pending", "replica b: not loaded yet"),
        ((loaded(V, "loading"),), "pending", "replica b: loading"),
        ((loaded(V, "draining"),), "pending", "replica b: draining"),
        ((LoadedVersion(version=V, state="ready"),), "pending", "replica b: ready but not probed"),
        ((loaded(V, "failed", error="no memory"),), "failed", "replica b: no memory"),
        ((loaded(V, passed=False),), "failed", r"replica b: probe failed: max \|Δlogprob\| 0.001, parent 0.5"),
        ((loaded(V, passed=False, error="equals its parent"),), "failed", "replica b: equals its parent"),
        ((loaded("m@ffffffffffff"),), "pending", "replica b: not loaded yet"),
    ],
)
def test_probe_result_depends_on_the_worst_replica(
    versions: tuple[LoadedVersion, ...], state: str, reason: str
) -> None:
    result = probe.probe_result(V, [replica("a", loaded(V)), replica("b", *versions)])
    assert result.state == state
    assert re.fullmatch(reason, result.reason)


def test_probe_result_is_pending_without_replicas() -> None:
    assert probe.probe_result(V, []).state == "pending"


def test_probe_result_ignores_earlier_heartbeats() -> None:
    failed_once = replica("a", loaded(V, "failed", error="earlier attempt"), at_s=1)
    assert probe.probe_result(V, [failed_once], START + timedelta(seconds=2)).state == "pending"
    assert probe.probe_result(V, [failed_once], START + timedelta(seconds=1)).state == "failed"


def test_served_by_any_needs_a_passed_probe() -> None:
    assert probe.served_by_any(V, [replica("a"), replica("b", loaded(V))])
    assert not probe.served_by_any(V, [replica("a", LoadedVersion(version=V, state="ready"))])
    assert not probe.served_by_any(V, [replica("a", loaded(V, passed=False))])


def test_refused_by_all_needs_all_replicas() -> None:
    broken = replica("a", loaded(V, "failed", error="no memory"))
    assert probe.refused_by_all(V, [broken]) == "no memory"
    assert probe.refused_by_all(V, [broken, replica("b", loaded(V, "loading"))]) is None
    assert probe.refused_by_all(V, []) is None


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


async def post(rig: Rig, action: str, status: int = 200, **body: object) -> ModelState:
    async with client(rig) as http:
        answer = await http.post(f"/v1/models/{MODEL}/{action}", json=body)
    assert answer.status_code == status, answer.text
    rig.model_controller.wake.set()
    return ModelState.model_validate_json(answer.content)


async def test_pin_keeps_the_champion_until_it_is_removed(rig: Rig) -> None:
    (champion,) = await rig.promote_in_turn(0)
    assert (await post(rig, "pin", reason="the fair")).pinned == champion
    assert rig.routing.pinned == champion
    newer, newest = await rig.checkpoint(1), await rig.checkpoint(2)
    rig.follow()
    await rig.ticks(5)
    assert rig.routing.aliases == {"champion": champion}
    assert [served.version for served in rig.routing.serve] == [champion], "nothing is loaded in vain"
    await post(rig, "unpin")
    async with rig.running():
        await rig.until(lambda: ("promoted", newest) in rig.decided())
    assert await rig.state(newer) == "skipped"
    assert rig.routing.pinned is None


async def test_pin_and_pause_release_the_candidate(rig: Rig) -> None:
    (champion,) = await rig.promote_in_turn(0)
    rig.gate.open.clear()
    candidate = await rig.checkpoint(1)
    async with rig.running():
        await rig.until(lambda: candidate in rig.gate.players)
        await post(rig, "pause")
        await rig.until(lambda: rig.gate.cancelled == [{champion, candidate}])
        assert await rig.state(candidate) == "registered"
        assert rig.routing.paused
        rig.gate.open.set()
        await post(rig, "resume")
        await rig.until(lambda: ("promoted", candidate) in rig.decided())
    assert rig.routing.aliases == {"champion": candidate, "previous": champion}


async def test_pin_promotes_another_version_after_its_probe(rig: Rig) -> None:
    old, new = await rig.promote_in_turn(0, 1)
    rig.gate.scores[old] = {"t1": 0.0, "t2": 0.0}
    state = await post(rig, "pin", version=old)
    assert (state.champion, state.pinned) == (new, old)
    async with rig.running():
        await rig.until(lambda: rig.routing.champion == old)
        later = await rig.checkpoint(2)
        await rig.ticks(0)
    await rig.ticks(3)
    assert await rig.state(later) == "registered"


async def test_requested_version_moves_during_a_pause_but_not_a_pin(rig: Rig) -> None:
    await rig.promote_in_turn(0)
    await post(rig, "pause")
    requested = await rig.checkpoint(1)
    await post(rig, "promote", 202, version=requested)
    async with rig.running():
        await rig.until(lambda: rig.routing.champion == requested)
    await post(rig, "pin")
    other = await rig.checkpoint(2)
    async with client(rig) as http:
        answer = await http.post(f"/v1/models/{MODEL}/promote", json={"version": other, "force": True})
    assert error(answer) == (409, "pinned")


async def test_rollback_removes_the_pin_of_the_withdrawn_version(rig: Rig) -> None:
    old, new = await rig.promote_in_turn(0, 1)
    await post(rig, "pin")
    assert (await post(rig, "rollback")).pinned is None
    assert rig.routing.aliases == {"champion": old}
    async with client(rig) as http:
        assert error(await http.post(f"/v1/models/{MODEL}/pin", json={"version": new})) == (409, "withdrawn")


async def test_rollback_keeps_the_pin_of_another_version(rig: Rig) -> None:
    old, _ = await rig.promote_in_turn(0, 1)
    await post(rig, "pin", version=old)
    assert (await post(rig, "rollback")).pinned == old


@pytest.mark.parametrize("action", ["pause", "resume", "unpin"])
async def test_repeated_hold_request_changes_nothing(rig: Rig, action: str) -> None:
    await rig.promote_in_turn(0)
    first = await post(rig, action)
    assert await post(rig, action) == first


async def test_pin_is_refused_without_a_champion(rig: Rig) -> None:
    await rig.checkpoint(0)
    async with client(rig) as http:
        assert error(await http.post(f"/v1/models/{MODEL}/pin")) == (409, "no_champion")


async def test_holds_survive_a_restart(rig: Rig) -> None:
    await rig.promote_in_turn(0)
    await post(rig, "pause")
    rig.boot()
    await rig.lease.acquire()
    await rig.checkpoint(1)
    await rig.ticks(3)
    assert [d for d in rig.decided() if d[0] == "promoted"] == [("promoted", rig.routing.champion)]
