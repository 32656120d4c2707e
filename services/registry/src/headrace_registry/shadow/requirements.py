"""Requirements for an estimate from a shadow, declared with the plan of a rollout."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from headrace_runtime.settings.sections import Section


class EstimateRequirements(Section):
    """Minimum numbers for an estimate. Below them there is none, and the reason is reported."""

    pairs_min: Annotated[int, Field(ge=10)] = 40
    """Prompts with two judged answers."""
    spoke_min: Annotated[int, Field(ge=10)] = 30
    """Sessions with feedback of the user on an answer whose weight is known."""
    effective_min: Annotated[float, Field(ge=10)] = 25.0
    """Effective number of the champion's answers when they are weighted for the candidate."""
    effective_share_min: Annotated[float, Field(gt=0, le=1)] = 0.2
    """The same, as a share of their number."""
