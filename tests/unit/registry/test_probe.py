"""Probes count only if they passed on every live replica."""

from __future__ import annotations

import re
from datetime import timedelta

import pytest

from headrace_registry.versions import probe
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
