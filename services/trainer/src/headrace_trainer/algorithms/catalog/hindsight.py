"""`hindsight`: the model, told what the user said next, teaches the model that was not told (self-distillation:
arXiv:2601.20802, equation 1; of users' replies arXiv:2603.12273; of next states arXiv:2603.10165).

    A_n = coefficient clip(log pi_base(n | prompt, reply) - log mu(n | prompt), +- limit)    mu: the engine
    L   = - 1/N sum_n min(rho A, clip(rho) A)                                                over a contradicted answer

or, with `compared = "distributions"`, in the mean over all words v at place n:

    B_nv = coefficient clip(log pi_base(v | prompt, reply) - log pi(v | prompt), +- limit)   pi: the present weights
    L    = - 1/N sum_n sum_v pi(v) B_nv                                                      B has no gradient

and over accepted answers too, whose teacher is the base without a reply: it holds the policy where it was right.

The teacher is the base, so it stays as it is; `reply` is the user's next message, put before the answer's opening. An
answer is contradicted or accepted by the reward of its turn, e.g. of the reward function `signals`. Needs the base
(`hindsight`) and logprobs, and no reward of the run.

Before each step the gap between teacher and student is measured, on the answers that the model gave to the replies:

    d   = mean_n log pi_base(n | prompt, reply) - max(mean_n log pi_base(n | prompt, another run's reply),
                                                      mean_n log pi_base(n | prompt))        of run i its mean, d_i

A base that cannot read replies has d = 0, and replies that belong elsewhere have no positive d. A step is refused until
the lower end of d's interval is positive. With A, accepted answers are trained with an advantage of 0. They are the
guard set: how far they have dropped beneath the base is measured after each step (`trainer.health.guard_drop_max`).

The teacher stays, so what is withdrawn is trained once more with the opposite sign: with A exactly.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, model_validator

from headrace_runtime import student
from headrace_runtime.settings import Section
from headrace_trainer.algorithms.estimators import as_they_are, estimator
from headrace_trainer.algorithms.needs import Needs
from headrace_trainer.algorithms.presets import Algorithm
from headrace_trainer.algorithms.signals import Signals

if TYPE_CHECKING:
    from headrace_trainer.algorithms.settings import AdvantageSettings


class HindsightSettings(Section):
    """`[trainer.advantage.hindsight]`."""

    contradicted_max: float = 0.25
    """A turn whose reward is at most this was contradicted, if a message of the user follows."""
    accepted_min: float = 0.75
    """One whose reward is at least this was accepted."""
    coefficient: Annotated[float, Field(gt=0)] = 1.0
    """The advantage of a token that the teacher thinks more likely by one nat."""
    compared: Literal["tokens", "distributions"] = "tokens"
    """`tokens`: what the teacher thinks of the tokens that were sampled. `distributions`: of all words at their places,
    beside the present weights (B above). It learns from a fraction of the sessions; what is withdrawn is taken back
    to first order only. Needs an output head that is one matrix, and `loss.sequence_mask_max` = 0."""
    limit: Annotated[float, Field(gt=0)] = 5.0
    """What a token counts at most, in nats: one that the teacher rules out is no reason for anything more."""
    runs_min: Annotated[int, Field(ge=2)] = 8
    """Runs with a contradicted answer from which on the gap is believed."""
    guard_answers: Annotated[int, Field(ge=2, le=4096)] = 64
    """Accepted answers that make the guard set; the newest are kept."""

    @model_validator(mode="after")
    def _no_answer_is_both(self) -> Self:
        if self.contradicted_max >= self.accepted_min:
            raise ValueError(f"contradicted_max is not below accepted_min = {self.accepted_min:g}")
        return self


def hindsight_of(settings: AdvantageSettings) -> HindsightSettings:
    """Its own section."""
    own = settings.of("hindsight")
    assert isinstance(own, HindsightSettings)
    return own


@dataclass(frozen=True, slots=True)
class GapEstimate:
    """The mean of independent values, and where it may lie: Student's interval, of which each side fails in 2.5 %."""

    count: int = 0
    total: float = 0.0
    squares: float = 0.0

    @classmethod
    def of(cls, values: Iterable[float]) -> GapEstimate:
        return cls().plus(values)

    def plus(self, values: Iterable[float]) -> GapEstimate:
        """With more values."""
        given = list(values)
        return GapEstimate(
            self.count + len(given),
            math.fsum([self.total, *given]),
            math.fsum([self.squares, *(value * value for value in given)]),
        )

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0

    @property
    def low(self) -> float:
        """Minus infinity for less than two values."""
        if self.count < 2:
            return -math.inf
        left = self.count - 1
        variance = max(0.0, self.squares - self.total * self.total / self.count) / left
        return self.mean - student.quantile(0.975, left) * math.sqrt(variance / self.count)


def refusal(gap: GapEstimate, settings: HindsightSettings) -> str | None:
    """Why nothing is trained, None when the gap is positive."""
    if gap.count < settings.runs_min:
        return (
            f"the gap between teacher and student was measured on {gap.count} runs, below "
            f"trainer.advantage.hindsight.runs_min = {settings.runs_min}; raise trainer.batch_experiences_min"
        )
    if gap.low > 0:
        return None
    return (
        f"the gap between teacher and student is {gap.mean:.4g} nats a token over {gap.count} runs, and not surely "
        f"positive (at least {gap.low:.4g}): told what users said next, this base answers no better. Take a larger "
        'base, or another algorithm ("reinforce++" with the rewards of turns)'
    )


told = estimator(Needs(hindsight=True, logprobs=True), HindsightSettings, signals=Signals(rewards=False, replies=True))(
    as_they_are
)
HINDSIGHT = Algorithm("hindsight", "clipped", {"batch_wait_s": 600.0})
