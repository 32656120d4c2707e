"""The scorer, which joins trajectories with rewards and feedback into experiences, the trainer's input."""

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
