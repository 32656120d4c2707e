"""What a kind of advantage or a loss cannot do without. Who has it says so too, and the start compares the two."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Declared by whoever is announced under `headrace.advantages` or `headrace.losses`, and what a back end offers."""

    groups: bool = False
    """Several runs of a task in one batch: `trainer.group_size` is waited for, and single runs are dropped."""
    logprobs: bool = False
    """Those of the engine, of the tokens that it sampled. Written tokens have none, and are refused."""
    reference: bool = False
    """Logprobs of the same tokens under the model that the lineage began with, which is kept in memory."""
    critic: bool = False
    """Values of a model that learns to predict rewards; what it makes of the rewards is the advantage of each token."""
    demonstrations: bool = False
    """Tokens that a person or a data set wrote, and what somebody says that an answer should have been."""
    pairs: bool = False
    """Both answers that somebody compared, in one pass."""
    turn_rewards: bool = False
    """What single turns are worth, and advantages of their own for them."""
    teacher: bool = False
    """Logprobs of the same tokens under another model, `trainer.teacher`."""
    hindsight: bool = False
    """Logprobs of the same tokens under the model that the lineage began with, told what the user said next."""

    def __or__(self, other: Needs) -> Needs:
        return Needs(**{one.name: getattr(self, one.name) or getattr(other, one.name) for one in fields(self)})

    def beyond(self, offered: Needs) -> tuple[str, ...]:
        """What is needed and not offered."""
        return tuple(one.name for one in fields(self) if getattr(self, one.name) and not getattr(offered, one.name))


NOTHING = Needs()
OFFERED = Needs(groups=True, logprobs=True, demonstrations=True, turn_rewards=True)
"""What the trainer has whatever its back end; that one offers the rest (`headrace_trainer.backends.Backend.offers`)."""
