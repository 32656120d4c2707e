"""Metrics of the collector."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

OPEN_SESSIONS = Gauge("headrace_collector_open_sessions", "Sessions with a run that has not ended")
WAITING_ENDS = Gauge("headrace_collector_waiting_ends", "Ends that wait for turns sent before them")
WAITING_FEEDBACK = Gauge("headrace_collector_waiting_feedback", "Feedback whose turns have not been seen")
TRAJECTORIES = Counter("headrace_collector_trajectories_total", "Runs that were closed", ["end_reason"])
LEFT_OUT = Counter("headrace_collector_left_out_total", "Turns in no branch, without evaluations", ["reason"])
TOKENS = Counter("headrace_collector_tokens_total", "Tokens of answers to agents by how they were sampled", ["kind"])
BRANCHES = Histogram(
    "headrace_collector_branches", "Branches of a trajectory", buckets=(0, 1, 2, 3, 5, 10, 20, 50, 100, 1000)
)
TURNS = Histogram("headrace_collector_turns", "Turns of a trajectory", buckets=(1, 2, 3, 5, 10, 20, 50, 100, 1000))
