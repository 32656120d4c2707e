"""The service `echo`, which returns the last answers of the models."""

from __future__ import annotations

from headrace_runtime.services import ServiceInfo

INFO = ServiceInfo(
    module="headrace_stranger",
    summary="Repeats what models have said.",
    port=8090,
    consumes=("turns",),
    gateway_setting="echo.gateway_url",
)
