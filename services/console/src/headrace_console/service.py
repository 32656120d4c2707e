"""Description of this service for the entry points `headrace.services`."""

from __future__ import annotations

from headrace_runtime.services import ServiceInfo

INFO = ServiceInfo(
    module="headrace_console",
    summary="Web console: what the stack learns and why, and decisions about versions.",
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
