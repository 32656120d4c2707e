"""The collector: assembles trajectories from turns."""

from __future__ import annotations

from headrace_runtime.services import ServiceInfo

INFO = ServiceInfo(
    module="headrace_collector",
    summary="Turns to trajectories.",
    port=8031,
    consumes=("turns", "session-ends", "feedback"),
    produces=("trajectories",),
    database=True,
    is_background=True,
)
