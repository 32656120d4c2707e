"""The registry of model versions. Each version is probed by every replica, tested on held-out tasks, and then promoted
or rolled back."""

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
