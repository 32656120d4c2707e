"""The service `echo`, which returns the last answers of the models, and its settings."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from headrace_runtime.services import ServiceInfo
from headrace_runtime.settings.sections import Port, ServiceSettings

INFO = ServiceInfo(
    module="headrace_stranger",
    summary="Repeats what models have said.",
    port=8090,
    consumes=("turns",),
    gateway_setting="echo.gateway_url",
)


class EchoSettings(ServiceSettings):
    """Settings in the section `[echo]`."""

    port: Port = INFO.port
    """Port of `/health`, `/metrics` and `/last`; 0 lets the system choose."""
    kept_max: Annotated[int, Field(ge=1, le=1000)] = 10
    """Number of answers that `/last` returns."""
    gateway_url: str = ""
    """Address of the gateway; `headrace up` sets it."""
