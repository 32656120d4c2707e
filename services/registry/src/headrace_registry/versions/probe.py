"""Evaluation of the probes of a version, from the heartbeats of replicas."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Literal

from headrace_schemas import LoadedVersion, Replica

_REASONS_MAX = 5


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """Result of a version's probes on all live replicas.

    `passed`: each live replica reports the version as ready with a passed probe. `failed`: a live replica refuses it.
    `pending`: otherwise.
    """

    state: Literal["passed", "pending", "failed"]
    reason: str = ""
    statistics: dict[str, float] = field(default_factory=dict)


def live_replicas(replicas: Iterable[Replica], now: datetime) -> list[Replica]:
    """Return the replicas whose last heartbeat is not older than its `ttl_s` and that are not stopping."""
    return [
        replica
        for replica in replicas
        if not replica.stopping and replica.time + timedelta(seconds=replica.ttl_s) >= now
    ]


def probe_result(version: str, replicas: Sequence[Replica], since: datetime | None = None) -> ProbeResult:
    """Return the result of the probes of `version` on live replicas. Heartbeats from before `since` are ignored."""
    if not replicas:
        return ProbeResult("pending", "no replica is alive")
    pending: list[str] = []
    deltas: list[float] = []
    parents: list[float] = []
    for replica in replicas:
        loaded = _loaded(replica, version) if since is None or replica.time >= since else None
        failure = _failure(loaded) if loaded else None
        if failure:
            return ProbeResult("failed", f"replica {replica.replica_id}: {failure}")
        if loaded is None or loaded.state != "ready" or loaded.probe is None:
            pending.append(f"replica {replica.replica_id}: {_progress(loaded)}")
            continue
        deltas.append(loaded.probe.max_abs_delta)
        if loaded.probe.parent_max_abs_delta is not None:
            parents.append(loaded.probe.parent_max_abs_delta)
    if pending:
        return ProbeResult("pending", "; ".join(pending[:_REASONS_MAX]))
    numbers = {"replicas": float(len(replicas)), "max_abs_delta": max(deltas)}
    if parents:
        numbers["parent_max_abs_delta"] = min(parents)
    return ProbeResult("passed", statistics=numbers)


def served_by_any(version: str, replicas: Iterable[Replica]) -> bool:
    """Return whether at least one of the replicas has `version` ready with a passed probe."""
    entries = (_loaded(replica, version) for replica in replicas)
    return any(
        entry is not None and entry.state == "ready" and entry.probe is not None and entry.probe.passed
        for entry in entries
    )


def refused_by_all(version: str, replicas: Sequence[Replica]) -> str | None:
    """Return the first replica's error if all replicas refuse `version`, else None."""
    entries = [_loaded(replica, version) for replica in replicas]
    errors = [_failure(loaded) if loaded else None for loaded in entries]
    return errors[0] if errors and all(errors) else None


def unserved_reason(version: str, replicas: Sequence[Replica]) -> str | None:
    """Return the reason why no live replica serves `version`, which contains that of each replica; None if one serves
    it."""
    if served_by_any(version, replicas):
        return None
    if not replicas:
        return "no replica is alive"
    reasons = []
    for replica in replicas:
        loaded = _loaded(replica, version)
        reasons.append(f"replica {replica.replica_id}: {(loaded and _failure(loaded)) or _progress(loaded)}")
    return "; ".join(reasons[:_REASONS_MAX])


def _loaded(replica: Replica, version: str) -> LoadedVersion | None:
    return next((loaded for loaded in replica.versions if loaded.version == version), None)


def _failure(loaded: LoadedVersion) -> str | None:
    if loaded.state == "failed":
        return loaded.error or "failed to load"
    if loaded.probe is not None and not loaded.probe.passed:
        probe = loaded.probe
        return (
            loaded.error or f"probe failed: max |Δlogprob| {probe.max_abs_delta:g}, parent {probe.parent_max_abs_delta}"
        )
    return None


def _progress(loaded: LoadedVersion | None) -> str:
    if loaded is None:
        return "not loaded yet"
    progress = "ready but not probed" if loaded.state == "ready" else loaded.state
    return f"{progress}: {loaded.error}" if loaded.error else progress
