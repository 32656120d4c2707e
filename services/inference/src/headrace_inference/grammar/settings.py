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
