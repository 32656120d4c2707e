"""Algorithms by name (the entry points `headrace.algorithms` of installed packages), their signals and their needs.

An algorithm is a kind of advantage and a loss, each with a registry of its own (`estimators.py`, `losses.py`), and
defaults of other settings. Settings of the user take precedence over these defaults.

Back ends declare which needs they meet, and the start compares the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from pydantic import BaseModel, JsonValue

from headrace_runtime.registries import Registry
from headrace_schemas.events.checkpoint import LearnedSignals


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Abilities that an estimator or a loss requires, or that a back end offers."""

    groups: bool = False
    """Several runs of a task in one batch: training waits for `trainer.group_size` of them, and drops single runs."""
    logprobs: bool = False
    """The engine's logprobs of the sampled tokens. Written tokens have none, and are refused; answers without them are
    left out. An algorithm without this need trains answers of temperature 0 and of other servers like any other."""
    reference: bool = False
    """Logprobs of the same tokens under the lineage's base, which is kept in memory."""
    critic: bool = False
    """Values of a model that learns to predict rewards, from which the advantage of each token is computed."""
    demonstrations: bool = False
    """Tokens that a person or a data set wrote, and edits of answers."""
    pairs: bool = False
    """Both answers of a comparison in one forward pass."""
    turn_rewards: bool = False
    """Rewards of single turns, and advantages of their own for turns."""
    teacher: bool = False
    """Logprobs of the same tokens under another model, `trainer.teacher`."""
    hindsight: bool = False
    """Logprobs of the same tokens under the lineage's base after the user's reply."""

    def __or__(self, other: Needs) -> Needs:
        return Needs(**{need.name: getattr(self, need.name) or getattr(other, need.name) for need in fields(self)})

    def missing_from(self, offered: Needs) -> tuple[str, ...]:
        """Return the names of the fields that are true here and false in `offered`."""
        return tuple(need.name for need in fields(self) if getattr(self, need.name) and not getattr(offered, need.name))


NOTHING = Needs()
OFFERED = Needs(groups=True, logprobs=True, demonstrations=True, turn_rewards=True)
"""Needs that the trainer meets with every back end; the rest are in `headrace_trainer.backends.Backend.offers`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Signals:
    """Kinds of training signals that an algorithm uses, such as rewards, edits or preferences.

    An experience without any signal that the algorithm uses is dropped as `no_signal`.
    """

    rewards: bool = True
    """The branch, by its reward. It is not trained if it has no reward."""
    branches: bool = False
    """The sampled branch, whatever its feedback is."""
    written: bool = False
    """The branch where a person or a data set wrote it (`origin`), as a demonstration."""
    edits: bool = False
    """Edits of its answers, as demonstrations."""
    replaced: bool = False
    """For each edit the answer that it replaces, as a rejected answer."""
    preferences: bool = False
    """Compared answers: chosen or rejected."""
    replies: bool = False
    """Answers that the user's next message replied to: as the estimator's `grade` values the reply, or with
    `Needs.hindsight` those that the reply contradicted and those that were accepted."""
    paired: bool = False
    """Whether chosen and rejected answers are trained together, or not at all."""

    @property
    def rewards_alone(self) -> bool:
        """Whether rewards of complete branches are the only signal: no edits, preferences, turn rewards or teachers."""
        return self == REWARDS

    def announcement(self, algorithm: str, *, logprobs: bool) -> LearnedSignals:
        """Return the kinds of feedback that `algorithm` trains, for the gateway and the account.

        Args:
            algorithm: name of the algorithm.
            logprobs: whether it needs the logprobs of the policy that sampled an answer.
        """
        return LearnedSignals(
            algorithm=algorithm,
            rewards=self.rewards or self.replies,
            edits=self.edits,
            preferences=self.preferences,
            logprobs=logprobs,
        )

    @property
    def answers(self) -> bool:
        """Whether the algorithm trains single answers, in addition to whole branches or instead of them."""
        return self.edits or self.preferences


REWARDS = Signals()
REPLIES = Signals(rewards=False, replies=True)


@dataclass(frozen=True, slots=True)
class Algorithm:
    """Settings that the setting `algorithm` selects by name: kind of advantage, loss, and defaults of other settings.

    `defaults` has settings of `[trainer]` by their dotted names: `{"advantage.scale": "none"}`.
    """

    advantage: str
    loss: str = "clipped"
    defaults: Mapping[str, JsonValue] = field(default_factory=dict)

    def merge_settings(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return the table `[trainer]` with the algorithm's defaults, overridden by the user's `settings`."""
        table: dict[str, Any] = {}
        for name, value in {"advantage.kind": self.advantage, "loss.kind": self.loss, **self.defaults}.items():
            *path, last = name.split(".")
            inner = table
            for part in path:
                inner = inner.setdefault(part, {})
            inner[last] = value
        return _merge(table, settings)


ALGORITHMS: Registry[Algorithm] = Registry("algorithms", Algorithm, "algorithm")

REINFORCE_PP = Algorithm("reinforce++")
GRPO = Algorithm("grpo")
DR_GRPO = Algorithm("grpo", defaults={"advantage.scale": "none"})
"""GRPO without the group's standard deviation in the denominator (arXiv:2503.20783)."""
RLOO = Algorithm("rloo")


def _merge(defaults: dict[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(defaults)
    for name, value in settings.items():
        default = merged.get(name)
        if isinstance(default, dict) and isinstance(value, BaseModel):
            value = {name: getattr(value, name) for name in value.model_fields_set}
        if isinstance(default, dict) and isinstance(value, Mapping):
            merged[name] = _merge(default, value)
        elif not (name == "kind" and value == "" and default):  # "" leaves the choice to the algorithm
            merged[name] = value
    return merged
