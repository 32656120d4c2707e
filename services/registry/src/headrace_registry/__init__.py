"""The registry of versions: each is probed by every replica, played on held-out tasks, and promoted or rolled back."""

from __future__ import annotations

from headrace_runtime.services import ServiceInfo

INFO = ServiceInfo(
    module="headrace_registry",
    summary="Versions, aliases, gates and routing.",
    port=8020,
    consumes=("checkpoints", "turns", "trajectories", "rewards", "feedback", "replicas"),
    produces=("routing", "model-events"),
    database=True,
    gateway_setting="registry.gate.base_url",
)
