"""Settings of the service `echo`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from headrace_runtime.settings.sections import Port, ServiceSettings
from headrace_stranger.service import INFO


class EchoSettings(ServiceSettings):
    """Settings in the section `[echo]`."""

    port: Port = INFO.port
    """Port of `/health`, `/metrics` and `/last`; 0 lets the system choose."""
    kept_max: Annotated[int, Field(ge=1, le=1000)] = 10
    """Number of answers that `/last` returns."""
    gateway_url: str = ""
    """Address of the gateway; `headrace up` sets it."""
