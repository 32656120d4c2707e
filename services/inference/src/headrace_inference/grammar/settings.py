"""The section `[inference.grammar]`: bounds of the grammar of one request."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from headrace_runtime.settings.sections import Section


class GrammarSettings(Section):
    """Bounds of `response_format` and forced tool calls. Requests beyond them are refused with 400."""

    TIER: ClassVar[Literal["tuning", "limits"]] = "limits"

    bytes_max: Annotated[int, Field(ge=256, le=1_048_576)] = 65_536
    """Largest grammar of a request as text: its JSON Schema, or those of the tools that it may call."""
    depth_max: Annotated[int, Field(ge=4, le=128)] = 48
    """Deepest nesting of a JSON Schema. References (`$ref`) are not followed."""
    compile_timeout_s: Annotated[float, Field(gt=0)] = 5.0
    """Seconds that the compilation of a new grammar may take: first on trial, in a process that is killed when it takes
    longer, then in the replica."""
    threads: Annotated[int, Field(ge=1, le=16)] = 1
    """Threads that compile grammars beside the event loop."""
    waiting_max: Annotated[int, Field(ge=1)] = 32
    """Grammars that may wait for a thread, shared equally by the tenants that wait; further requests get the error
    `overloaded`."""
    cached: Annotated[int, Field(ge=0, le=10_000)] = 256
    """Compiled grammars in the cache. Beyond it the tenant with the most loses the one that it has not used for
    longest."""
