"""What of an experience a kind of advantage trains: which of the things that are said about it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Signals:
    """An experience that carries none of these is dropped, with `no_signal` in its outcome."""

    rewards: bool = True
    """Its branch, by its reward. Without a reward there is nothing."""
    branches: bool = False
    """Its sampled branch, whatever is said about it."""
    written: bool = False
    """Its branch where a person or a data set wrote it (`origin`), as a demonstration."""
    edits: bool = False
    """What its turns should have answered, as demonstrations."""
    replaced: bool = False
    """With an edit also the answer that it replaces, which is rejected."""
    preferences: bool = False
    """The answers that somebody compared: chosen or rejected."""
    replies: bool = False
    """The answers that the user's next message contradicted, and those that were accepted."""
    paired: bool = False
    """What is chosen and what is rejected are trained together, or not at all."""

    @property
    def rewards_alone(self) -> bool:
        """Nothing but the branch is trained, and by nothing but its reward."""
        return self == REWARDS

    @property
    def answers(self) -> bool:
        """Single answers are trained, beside whole branches or instead of them."""
        return self.edits or self.preferences


REWARDS = Signals()
