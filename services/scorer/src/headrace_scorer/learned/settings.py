"""The section `[scorer.learned]`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from headrace_runtime.registries import NameIn
from headrace_runtime.settings.sections import Section
from headrace_scorer.learned.models import CONTROLLED, REWARD_MODELS, FitRequirements

PREFIX = "learned:"
Share = Annotated[float, Field(gt=0, le=1)]
THUMBS_MAX = 4000
"""Runs with thumbs that it learns from. The newest count."""
UNRATED_RUNS_MAX = 1000
"""Newest runs without thumbs that the model compares the rated ones with. They bound the time of a fit."""


class LearnedSettings(Section):
    """A reward model as one more source, `learned:<model>`. It learns from the runs that people have rated, and scores
    all runs."""

    model: Annotated[str, NameIn(REWARD_MODELS)] | None = None
    """Name of the reward model, as a package announces it. Not set: there is no reward model."""
    teachers: Annotated[tuple[str, ...], Field(min_length=1)] = ("feedback",)
    """Sources of feedback that it learns from. Values from 0 (bad) to 1 (good) count; other values are ignored."""
    features: tuple[str, ...] = ("function:*", "judge:*")
    """Sources whose values and criteria are features, besides the shape of the run. Functions that read feedback are
    never features. Give a source that should only be a feature the weight 0."""
    controlled: tuple[str, ...] = CONTROLLED
    """Features that the agent controls by its actions. They are learned, but the reward is computed with their mean
    values. Otherwise training would teach the agent to look like a good run."""
    thumbs_min: Annotated[int, Field(ge=10)] = 30
    """Thumbs that it needs before it scores runs."""
    width_max: Share = 0.6
    """Largest width of the 90 % interval of a run's value. Above it the model abstains."""
    refit_s: Annotated[float, Field(gt=0)] = 30.0
    """Seconds between checks of whether there are enough new thumbs to fit the model again."""

    @property
    def source(self) -> str:
        """Name of the reward model as a source in the ledger."""
        return f"{PREFIX}{self.model}"

    @property
    def requirements(self) -> FitRequirements:
        """Conditions under which the model scores runs."""
        return FitRequirements(self.thumbs_min, self.width_max, controlled=self.controlled)
