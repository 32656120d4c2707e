"""Interface of reward models, the registry of those that packages announce, and the section `[scorer.learned]`.

    [project.entry-points."headrace.reward_models"]
    thumbs = "my_package.models:THUMBS"

The module of a reward model should import heavy packages only in `fit`, so that reading a fitted model is fast.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from headrace_runtime.registries import NameIn, Registry
from headrace_runtime.settings.sections import Section

Features = Mapping[str, float]
"""Features of a run by name. A feature without a value is left out; it is not 0."""


@dataclass(frozen=True, slots=True)
class Thumb:
    """Rating that one person gives to a run, from 0 (bad) to 1 (good). `rater` is empty for people without a name."""

    rater: str
    value: float


@dataclass(frozen=True, slots=True)
class ThumbedRun:
    """A run that people have rated, with its features and thumbs."""

    trajectory_id: str
    features: Features
    thumbs: tuple[Thumb, ...]


CONTROLLED = ("run/*", "function:*/tool_failed", "function:*/looped")
"""Features that an agent controls by its actions, independent of their result."""


@dataclass(frozen=True, slots=True)
class QualityEstimate:
    """Estimated probability that a run is good, with its confidence interval and the reward that follows from it."""

    value: float
    low: float
    high: float
    paid: float
    """Reward of the run: the probability with the features that the agent controls replaced by their means."""


@dataclass(frozen=True, slots=True)
class FitRequirements:
    """Conditions for a reward model to score runs, and limits of its fit.

    `LearnedSettings` has those that users set.
    """

    thumbs_min: int = 30
    width_max: float = 0.6
    confidence: float = 0.9
    """Confidence level of the interval of a run's value."""
    rater_share_max: float = 0.1
    """Largest share of all thumbs that one named rater may have; five thumbs always count."""
    controlled: tuple[str, ...] = CONTROLLED
    """Patterns of features that the model learns but that do not change the reward: the agent could game them."""


class FittedModel(ABC):
    """A fitted reward model. Immutable; `judge` takes microseconds, so it may run on an event loop."""

    model_id: str
    """Digest of the fitted model. Equal training data give an equal id."""

    @abstractmethod
    def judge(self, features: Features) -> QualityEstimate | None:
        """Return the probability that a run with these features is good, or None if the model abstains."""

    @abstractmethod
    def to_json(self) -> bytes:
        """Serialize the model for `RewardModel.read`."""

    @abstractmethod
    def facts(self) -> dict[str, object]:
        """Return the training data's size and the quality of the fit as JSON, for the REST interface."""


Fit = Callable[[Sequence[ThumbedRun], Sequence[Features], FitRequirements], FittedModel]


@dataclass(frozen=True, slots=True)
class RewardModel:
    """A kind of reward model that a package announces: a function that fits a model and one that deserializes it."""

    fit: Fit
    """Fits a model to runs that people have rated, and to the features of runs without ratings. It is deterministic,
    and the order of the runs does not matter. It may take seconds, so it is never called on an event loop."""
    read: Callable[[bytes], FittedModel]
    """Reads a model that `FittedModel.to_json` serialized."""


REWARD_MODELS: Registry[RewardModel] = Registry("reward_models", RewardModel, "reward model")


_CLIPPED_AT = 4.0


@dataclass(frozen=True, slots=True)
class Column:
    """Standardized column of the feature table, computed from one feature: its value, or whether a run has it."""

    name: str
    presence: bool
    """Whether the column is 1 where the run has the feature and 0 elsewhere, instead of the feature's value."""
    mean: float
    deviation: float
    is_reward: bool = False
    """Whether the feature is the value of another source, of which a higher one is better."""
    controlled: bool = False
    """Whether the agent controls the feature, so that it does not change the reward."""

    def of(self, features: Features) -> float:
        """Return the column's number for a run, in standard deviations from the mean.

        The number is clipped, so that outliers have a bounded influence.
        """
        present = self.name in features
        if not present and not self.presence:
            return 0.0
        value = float(present) if self.presence else features[self.name]
        return max(-_CLIPPED_AT, min(_CLIPPED_AT, (value - self.mean) / self.deviation))


PREFIX = "learned:"
Share = Annotated[float, Field(gt=0, le=1)]
THUMBS_MAX = 4000
"""Largest number of runs with thumbs from which a model learns: the newest runs."""
UNRATED_RUNS_MAX = 1000
"""Newest runs without thumbs that the model compares the rated ones with. They bound the time of a fit."""


class LearnedSettings(Section):
    """A reward model as one more source, `learned:<model>`: it learns from rated runs and scores all runs."""

    PARAMETERS: ClassVar = ("thumbs_min",)

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
    """Thumbs that it needs before it scores runs: fewer say little about its many features."""
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
