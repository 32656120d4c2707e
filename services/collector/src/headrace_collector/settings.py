"""The collector's section of the settings file."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from headrace_collector.service import INFO
from headrace_runtime.settings import Port, ServiceSettings


class CollectorSettings(ServiceSettings):
    """When sessions end, and how much is kept of them."""

    COMMON: ClassVar = ("idle_s",)

    port: Port = INFO.port
    """Port of the service's HTTP; 0 lets the system choose."""
    idle_s: Annotated[float, Field(gt=0)] = 300.0
    """A run ends when nothing was seen of it for this long; counted from the service's own start at the earliest."""
    end_wait_s: Annotated[float, Field(gt=0)] = 900.0
    """How long an end waits at most for the turns that were sent before it."""
    feedback_wait_s: Annotated[float, Field(gt=0)] = 600.0
    """How long feedback waits for its turns before it is dead-lettered as `unknown_target`."""
    completions_per_session_max: Annotated[int, Field(ge=1, le=896)] = 800
    """A session with this many open completions is closed (`limit`); what follows is a new trajectory."""
    tokens_per_session_max: Annotated[int, Field(ge=1)] = 4_000_000
    """The same for the longest branch, in tokens: a prompt and what was sampled after it."""
    open_sessions_max: Annotated[int, Field(ge=1)] = 100_000
    """Beyond this many open sessions those that were not seen for longest are closed (`limit`)."""
    retention_s: Annotated[float, Field(ge=0)] = 900.0
    """How long the content of closed turns stays in the database."""
    remember_s: Annotated[float, Field(gt=0)] = 604_800.0
    """How long it is remembered which turns there were, for late turns and late feedback."""
