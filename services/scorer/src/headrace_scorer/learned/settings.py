"""The section `[scorer.learned]`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from headrace_runtime.registries import NameIn
from headrace_runtime.settings import Section
from headrace_scorer.learned.models import CONTROLLED, REWARD_MODELS, FitDemands

PREFIX = "learned:"
Share = Annotated[float, Field(gt=0, le=1)]


class LearnedSettings(Section):
    """A reward model as one more source, `learned:<model>`. It learns from the runs that people spoke of, and speaks
    of all of them."""

    model: Annotated[str, NameIn(REWARD_MODELS)] | None = None
    """The reward model, by the name that a package announces. Not set: there is none."""
    teachers: Annotated[tuple[str, ...], Field(min_length=1)] = ("feedback",)
    """Sources of feedback that it learns from. Their values are from 0, bad, to 1, good; others teach nothing."""
    features: tuple[str, ...] = ("function:*", "judge:*")
    """Sources whose values and criteria it sees, besides the shape of the run. Functions that read feedback are never
    among them. Give a source that is only seen the weight 0."""
    controlled: tuple[str, ...] = CONTROLLED
    """Features that the agent controls by what it does. Learned with all others, and not paid: the reward is what the
    run would be worth if it were like others in them. Else training finds out how to look like a good run."""
    thumbs_min: Annotated[int, Field(ge=10)] = 30
    """So many thumbs it wants before it says anything."""
    width_max: Share = 0.6
    """It abstains where the interval of a run's value is wider."""
    confidence: Annotated[float, Field(ge=0.5, lt=1)] = 0.9
    """How often that interval holds the truth."""
    rater_share_max: Share = 0.1
    """No named rater weighs more than this share of all thumbs, or five thumbs."""
    refit_s: Annotated[float, Field(gt=0)] = 30.0
    """How often it looks whether there is enough new to learn."""
    refit_share: Annotated[float, Field(ge=0, le=1)] = 0.05
    """It learns anew when so many of its thumbs are new or changed."""
    change_min: Annotated[float, Field(ge=0, le=1)] = 0.05
    """What it says of a run is revised when it changes by so much; each revision is trained."""
    thumbs_max: Annotated[int, Field(ge=100, le=20_000)] = 4000
    """Runs with thumbs that it learns from, the newest."""
    others_max: Annotated[int, Field(ge=100, le=20_000)] = 1000
    """Runs without thumbs that it compares them with, the newest."""
    rescored_max: Annotated[int, Field(ge=0)] = 20_000
    """Runs that are scored anew when it has learned anew, the newest."""

    @property
    def source(self) -> str:
        """Its name in the ledger."""
        return f"{PREFIX}{self.model}"

    @property
    def demands(self) -> FitDemands:
        return FitDemands(self.thumbs_min, self.width_max, self.confidence, self.rater_share_max, self.controlled)
