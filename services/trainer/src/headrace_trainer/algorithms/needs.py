"""The signals that an algorithm trains, and the needs that it has. Back ends declare which needs they meet, and the
start compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from headrace_schemas.events.checkpoint import LearnedSignals


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Signals:
    """Signals that are trained. An experience that carries none of them is dropped, with `no_signal` in its outcome."""

    rewards: bool = True
    """The branch, by its reward. Without a reward it is not trained."""
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
            algorithm: The name of the algorithm.
            logprobs: Whether it needs the logprobs of the policy that sampled an answer.
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
        """Whether single answers are trained, in addition to whole branches or instead of them."""
        return self.edits or self.preferences


REWARDS = Signals()
REPLIES = Signals(rewards=False, replies=True)
