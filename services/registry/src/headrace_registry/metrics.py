"""What the registry counts beside the shared metrics."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

DECISIONS = Counter("headrace_registry_decisions_total", "Decisions about versions", ["decision"])
LEADER = Gauge("headrace_registry_leader", "1 while this process decides, 0 while it stands by")
WAITING = Gauge("headrace_registry_waiting_versions", "Registered versions that wait for their turn", ["model"])
UNITS_FULL = Counter(
    "headrace_registry_rollout_events_left_out_total",
    "Events of units of a rollout that were not kept: the unit is closed, or has events_per_unit_max",
)
UNDER_WAY = Gauge("headrace_registry_rollouts_under_way", "Rollouts that are going on", ["model"])
SHADOW_PROMPTS = Counter(
    "headrace_registry_shadow_prompts_total", "Prompts of shadows, by what became of them", ["model", "outcome"]
)
GATE_SECONDS = Histogram(
    "headrace_registry_gate_seconds",
    "How long a gate run took, by how it ended",
    ["outcome"],
    buckets=(1, 2, 5, 10, 20, 60, 120, 300, 600, 1800),
)
