"""Metrics of the registry, in addition to those that all services have."""

from __future__ import annotations

from typing import TypeAlias

from prometheus_client import Counter, Gauge, Histogram

DECISIONS = Counter("headrace_registry_decisions_total", "Decisions about versions", ["decision"])
LEADER = Gauge("headrace_registry_leader", "1 while this process is the leader, 0 while it is a standby")
WAITING = Gauge("headrace_registry_waiting_versions", "Registered versions that wait for their turn", ["model"])
UNITS_FULL = Counter(
    "headrace_registry_rollout_events_left_out_total",
    "Events of units of a rollout that were not kept: the unit is closed, or has 1,024 events",
)
UNDER_WAY = Gauge("headrace_registry_rollouts_under_way", "Rollouts in progress", ["model"])
Level: TypeAlias = Gauge
"""Type of the gauges of a rollout."""
ROLLOUT_STEPS = Counter("headrace_registry_rollout_steps_total", "Steps of rollouts", ["model", "kind"])
ROLLOUT_UNITS_READ = Counter(
    "headrace_registry_rollout_units_read_total", "Units that came to the age of their first reading", ["model", "arm"]
)
ROLLOUT_SHARE = Gauge("headrace_registry_rollout_share", "Share of the units of a candidate", ["model", "slot"])
ROLLOUT_EXPOSURE = Gauge(
    "headrace_registry_rollout_exposure",
    "Share of the turns since a rollout began that its candidate answered",
    ["model", "slot"],
)
ROLLOUT_DIFFERENCE = Gauge(
    "headrace_registry_rollout_difference",
    "Candidate less champion, and the ends of its confidence sequence",
    ["model", "slot", "metric", "end"],
)
SHADOW_PROMPTS = Counter(
    "headrace_registry_shadow_prompts_total", "Prompts of shadows, by outcome", ["model", "outcome"]
)
ROLLOUT_HARM = Gauge(
    "headrace_registry_rollout_harm",
    "Evidence of harm as a share of that which rolls a candidate back, by guardrail",
    ["model", "slot", "metric"],
)
GATE_SECONDS = Histogram(
    "headrace_registry_gate_seconds",
    "Duration of a gate run, by its outcome",
    ["outcome"],
    buckets=(1, 2, 5, 10, 20, 60, 120, 300, 600, 1800),
)
