"""The OpenAI-compatible gateway: it serves every agent's model calls and captures them with their exact tokens."""

from __future__ import annotations

from headrace_runtime.services import ServiceInfo

INFO = ServiceInfo(
    module="headrace_gateway",
    summary="The OpenAI-compatible door: serves agents from the replicas and captures every model call.",
    port=8000,
    more_ports=("trinity_port",),
    consumes=("routing", "replicas"),
    produces=("turns", "feedback", "session-ends", "trajectories"),
    is_gateway=True,
)
