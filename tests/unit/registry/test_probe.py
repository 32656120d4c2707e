"""What counts as probed: every live replica, a passed probe, nothing less."""

from __future__ import annotations

import re
from datetime import timedelta

import pytest

from headrace_registry import probe
from headrace_schemas import LoadedVersion, Replica
from tests.unit.registry.rig import START, loaded

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


def test_silent_and_stopping_replicas_do_not_count() -> None:
    replicas = [replica("fresh", at_s=5), replica("silent", at_s=-6), replica("leaving", at_s=5, stopping=True)]
    assert [one.replica_id for one in probe.live(replicas, START + timedelta(seconds=5))] == ["fresh"]


def test_model_that_no_replica_serves_has_each_replicas_reason() -> None:
    refused = replica("a", loaded(V, "failed", error="no memory"))
    unprobed = replica("b", loaded(V, passed=False, error="probe refused"))
    waiting = replica("c", LoadedVersion(version=V, state="loading", error="disk: 1.0 MB are free on /data"))
    reason = "replica a: no memory; replica b: probe refused; replica c: loading: disk: 1.0 MB are free on /data"
    assert probe.unserved(V, [refused, unprobed, waiting]) == reason
    assert probe.unserved(V, [refused, replica("d", loaded(V))]) is None
    assert probe.unserved(V, [replica("e")]) == "replica e: not loaded yet"
    assert probe.unserved(V, []) == "no replica is alive"


def test_all_ready_with_passed_probes() -> None:
    found = probe.result(V, [replica("a", loaded(V)), replica("b", loaded(V))])
    assert found.state == "passed"
    assert found.statistics == {"replicas": 2.0, "max_abs_delta": 0.001, "parent_max_abs_delta": 0.5}


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
def test_one_replica_decides_for_all(versions: tuple[LoadedVersion, ...], state: str, reason: str) -> None:
    found = probe.result(V, [replica("a", loaded(V)), replica("b", *versions)])
    assert found.state == state
    assert re.fullmatch(reason, found.reason)


def test_no_replica_is_not_a_pass() -> None:
    assert probe.result(V, []).state == "pending"


def test_heartbeats_from_before_say_nothing() -> None:
    failed_once = replica("a", loaded(V, "failed", error="earlier attempt"), at_s=1)
    assert probe.result(V, [failed_once], START + timedelta(seconds=2)).state == "pending"
    assert probe.result(V, [failed_once], START + timedelta(seconds=1)).state == "failed"


def test_served_by_any_needs_a_passed_probe() -> None:
    assert probe.served_by_any(V, [replica("a"), replica("b", loaded(V))])
    assert not probe.served_by_any(V, [replica("a", LoadedVersion(version=V, state="ready"))])
    assert not probe.served_by_any(V, [replica("a", loaded(V, passed=False))])


def test_refused_by_all_needs_all() -> None:
    broken = replica("a", loaded(V, "failed", error="no memory"))
    assert probe.refused_by_all(V, [broken]) == "no memory"
    assert probe.refused_by_all(V, [broken, replica("b", loaded(V, "loading"))]) is None
    assert probe.refused_by_all(V, []) is None
