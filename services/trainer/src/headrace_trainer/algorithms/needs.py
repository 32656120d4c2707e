"""The needs of advantages and losses. Back ends declare which of them they meet, and the start compares the two."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Needs that an estimator or a loss declares, or that a back end meets."""

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
        """Return the names of the needs that `offered` does not meet."""
        return tuple(need.name for need in fields(self) if getattr(self, need.name) and not getattr(offered, need.name))


NOTHING = Needs()
OFFERED = Needs(groups=True, logprobs=True, demonstrations=True, turn_rewards=True)
"""Needs that the trainer meets with every back end; the rest are in `headrace_trainer.backends.Backend.offers`."""
