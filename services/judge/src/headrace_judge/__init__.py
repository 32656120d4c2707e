"""An LLM judge as a source of rewards.

It reads trajectories, calls an OpenAI-compatible endpoint, and writes rewards.
"""

from __future__ import annotations

from headrace_runtime.services import ServiceInfo

INFO = ServiceInfo(
    module="headrace_judge",
    summary="An LLM judge: trajectories to rewards.",
    port=8033,
    needs_setting="judge.endpoint.base_url",
    consumes=("trajectories",),
    produces=("rewards",),
    database=True,
    is_background=True,
)
