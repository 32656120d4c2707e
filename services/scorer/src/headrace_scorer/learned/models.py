"""What a reward model is, and the registry of those that packages announce.

    [project.entry-points."headrace.reward_models"]
    thumbs = "my_package.models:THUMBS"

A kind is light to import: what is heavy it imports when it fits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from headrace_runtime.registries import Registry

Features = Mapping[str, float]
"""What is known of a run by name. What is not known is left out, and is never a zero."""


@dataclass(frozen=True, slots=True)
class Thumb:
    """What one person says of a run: from 0, bad, to 1, good. `rater` is empty for people without a name."""

    rater: str
    value: float


@dataclass(frozen=True, slots=True)
class ThumbedRun:
    """A run that people have spoken of."""

    trajectory_id: str
    features: Features
    thumbs: tuple[Thumb, ...]


CONTROLLED = ("run/*", "function:*/tool_failed", "function:*/looped")
"""Features that an agent controls by what it does, whatever comes of it."""


@dataclass(frozen=True, slots=True)
class LikelyThumb:
    """How probable it is that a run is good, with the interval in which that probability lies."""

    value: float
    low: float
    high: float
    paid: float
    """What of it is a reward: the same, as if the run were like all others in what the agent controls."""


@dataclass(frozen=True, slots=True)
class FitDemands:
    """When a reward model may speak: the settings that it is fitted and asked with."""

    thumbs_min: int = 30
    width_max: float = 0.6
    confidence: float = 0.9
    rater_share_max: float = 0.1
    controlled: tuple[str, ...] = CONTROLLED
    """Patterns of features that it learns from, so that no other feature is credited for them, and does not pay."""


class FittedModel(ABC):
    """A reward model that has learned. Immutable; `judge` takes microseconds and may run on an event loop."""

    model_id: str
    """Digest of all that it learned: equal facts give an equal id."""

    @abstractmethod
    def judge(self, features: Features) -> LikelyThumb | None:
        """None where it is not sure."""

    @abstractmethod
    def to_json(self) -> bytes:
        """What `RewardModel.read` takes."""

    @abstractmethod
    def facts(self) -> dict[str, object]:
        """What it was learned from and how well it does, for people to read. JSON."""


Fit = Callable[[Sequence[ThumbedRun], Sequence[Features], FitDemands], FittedModel]


@dataclass(frozen=True, slots=True)
class RewardModel:
    """A kind of reward model."""

    fit: Fit
    """Learns from what people said of runs; the second are runs that nobody spoke of. Deterministic, and the order of
    either does not matter. May take seconds: never called on an event loop."""
    read: Callable[[bytes], FittedModel]
    """Reads what `FittedModel.to_json` made."""


REWARD_MODELS: Registry[RewardModel] = Registry("reward_models", RewardModel, "reward model")
