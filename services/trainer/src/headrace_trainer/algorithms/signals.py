"""The signals of an experience that a kind of advantage trains: rewards, edits, preferences and others."""

from __future__ import annotations

from dataclasses import dataclass

from headrace_schemas.events.checkpoint import LearnedSignals


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
    """Answers that the user's next message contradicted, and those that were accepted."""
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
