"""Description of this service for the entry points `headrace.services`."""

from __future__ import annotations

from headrace_runtime.services import ServiceInfo

INFO = ServiceInfo(
    module="headrace_console",
    summary="Web console: sessions, training, rollouts and dead letters, with forms for feedback and decisions.",
    port=8040,
    consumes=(
        "turns",
        "feedback",
        "trajectories",
        "rewards",
        "experiences",
        "training-metrics",
        "dead-letters",
        "dead-letter-decisions",
        "replicas",
    ),
    database=True,
)
