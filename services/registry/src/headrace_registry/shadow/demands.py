"""What has to be there before a shadow says anything about users. Declared with the plan of a rollout."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from headrace_runtime.settings import Section


class Demands(Section):
    """Below these there is no estimate, and the reason has a name."""

    pairs_min: Annotated[int, Field(ge=10)] = 40
    """Prompts with two judged answers."""
    spoke_min: Annotated[int, Field(ge=10)] = 30
    """Sessions whose users said something of an answer whose weight is known."""
    effective_min: Annotated[float, Field(ge=10)] = 25.0
    """As how many answers those of the champion have to count for the candidate."""
    effective_share_min: Annotated[float, Field(gt=0, le=1)] = 0.2
    """The same, as a part of their number."""
