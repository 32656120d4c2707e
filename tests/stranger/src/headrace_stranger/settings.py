"""The section `[echo]`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from headrace_runtime.settings.sections import Port, ServiceSettings
from headrace_stranger.service import INFO


class EchoSettings(ServiceSettings):
    """All of `[echo]`."""

    port: Port = INFO.port
    """Port of `/health`, `/metrics` and `/last`; 0 lets the system choose."""
    kept_max: Annotated[int, Field(ge=1, le=1000)] = 10
    """Answers that are kept."""
    gateway_url: str = ""
    """Where models are called; `headrace up` fills it in."""
