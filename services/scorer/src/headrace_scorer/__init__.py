"""The scorer, which turns trajectories, rewards and feedback into experiences."""

from __future__ import annotations

from headrace_runtime.services import ServiceInfo

INFO = ServiceInfo(
    module="headrace_scorer",
    summary="Trajectories, rewards and feedback to experiences.",
    port=8032,
    consumes=("trajectories", "rewards", "feedback"),
    produces=("rewards", "experiences"),
    database=True,
    is_background=True,
)
