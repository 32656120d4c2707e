"""The section `[collector]`."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from headrace_collector import INFO
from headrace_runtime.settings.sections import Port, ServiceSettings
from headrace_runtime.settings.table import Fixed


class CollectorSettings(ServiceSettings):
    """When sessions end, and how long their turns are stored."""

    COMMON: ClassVar = ("idle_s",)
    FIXED: ClassVar = {
        "completions_per_session_max": Fixed(800),
        "end_wait_s": Fixed(900.0),
        "tokens_per_session_max": Fixed(4_000_000),
    }

    port: Port = INFO.port
    """Port of the service's HTTP; 0 lets the system choose."""
    idle_s: Annotated[float, Field(gt=0)] = 300.0
    """Seconds without a turn after which a run ends; counted from the start of the service at the earliest."""
    feedback_wait_s: Annotated[float, Field(gt=0)] = 600.0
    """Seconds that feedback waits for its turns before it is dead-lettered as `unknown_target`."""
    open_sessions_max: Annotated[int, Field(ge=1)] = 100_000
    """Number of open sessions beyond which sessions are closed (`limit`): those that were idle for longest, of the
    tenants with the most open sessions."""
    side_calls: Literal["apart", "in_run"] = "apart"
    """Calls that an agent makes beside its task, such as a title for the conversation. `apart`: each conversation of
    them is a run that no reward of the session is trained on; feedback that lists its turns is. `in_run`: they are
    part of the session's run and get its reward."""
    retention_s: Annotated[float, Field(ge=0)] = 900.0
    """Seconds that the content of closed turns stays in the database."""
    remember_s: Annotated[float, Field(gt=0)] = 604_800.0
    """Seconds that the ids of turns stay in the database, for late turns and late feedback."""
