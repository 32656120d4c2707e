"""`hindsight`: the model, told what the user said next, teaches the model that was not told (self-distillation:
arXiv:2601.20802, equation 1; of users' replies arXiv:2603.12273; of next states arXiv:2603.10165).

    A_n = coefficient clip(log pi_base(n | prompt, reply) - log mu(n | prompt), +- limit)    mu: the engine
    L   = - 1/N sum_n min(rho A, clip(rho) A)                                                over a contradicted answer

or, with `compared = "distributions"`, in the mean over all words v at place n:

    B_nv = coefficient clip(log pi_base(v | prompt, reply) - log pi(v | prompt), +- limit)   pi: the present weights
    L    = - 1/N sum_n sum_v pi(v) B_nv                                                      B has no gradient

and over accepted answers too, whose teacher is the base without a reply: it holds the policy where it was right. What
the model answered to the reply is then trained as if nothing had been replied, in place of that answer a of the run
where it belonged:

    a = argmax_a mean_n log pi_base(n | prompt of a)      of the contradicted answer and the `earlier_max` before it

The teacher is the base, so it stays as it is; `reply` is the user's next message, put before the answer's opening. An
answer is contradicted or accepted by the reward of its turn, e.g. of the reward function `signals`. Needs the base
(`hindsight`) and logprobs, and no reward of the run.

Before each step the gap between teacher and student is measured, on the answers that the model gave to the replies:

    d   = mean_n log pi_base(n | prompt, reply) - max(mean_n log pi_base(n | prompt, other runs' replies),
                                                      mean_n log pi_base(n | prompt))        of run i its mean, d_i

A base that cannot read replies has d = 0, and replies that belong elsewhere have no positive d. No step is taken unless
d is positive in the mean and replies that were dealt out at random would hardly do as well (`algorithms.gap`): with few
runs a step waits for more of them, with `runs_max` it is refused.

With A, accepted answers are trained with an advantage of 0. They are the guard set: how far they have dropped beneath
the base is measured after each step (`trainer.health.guard_drop_max`).

The teacher stays, so what is withdrawn is trained once more with the opposite sign: with A exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, model_validator

from headrace_runtime.settings import Section
from headrace_trainer.algorithms.estimators import as_they_are, estimator
from headrace_trainer.algorithms.gap import GapEstimate
from headrace_trainer.algorithms.needs import Needs
from headrace_trainer.algorithms.presets import Algorithm
from headrace_trainer.algorithms.signals import Signals

if TYPE_CHECKING:
    from headrace_trainer.algorithms.settings import AdvantageSettings


ERROR = 0.1
"""How often training begins although replies say nothing of their own, at most, however long it waits."""

_TOLD_APART = 256
"""Runs from which on the level stays: deals could not tell rarer chances."""


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
    earlier_max: Annotated[int, Field(ge=0, le=64)] = 8
    """With `distributions`: how many answers of the run before the contradicted one, since the user spoke last, may be
    what the reply was about. 0: it is about the contradicted one."""
    limit: Annotated[float, Field(gt=0)] = 5.0
    """What a token counts at most, in nats: one that the teacher rules out is no reason for anything more."""
    runs_min: Annotated[int, Field(ge=2)] = 4
    """Runs with a contradicted answer from which on the gap is believed."""
    runs_max: Annotated[int, Field(ge=2)] = 64
    """With so many, a gap that is not surely positive ends training. With fewer the batch waits, and is cut again when
    there are twice as many experiences."""
    guard_answers: Annotated[int, Field(ge=2, le=4096)] = 64
    """Accepted answers that make the guard set; the newest are kept."""

    @model_validator(mode="after")
    def _bounds_are_apart(self) -> Self:
        if self.contradicted_max >= self.accepted_min:
            raise ValueError(f"contradicted_max is not below accepted_min = {self.accepted_min:g}")
        if self.runs_min > self.runs_max:
            raise ValueError(f"runs_min is above runs_max = {self.runs_max}")
        return self


def hindsight_of(settings: AdvantageSettings) -> HindsightSettings:
    """Its own section."""
    own = settings.of("hindsight")
    assert isinstance(own, HindsightSettings)
    return own


@dataclass(frozen=True, slots=True)
class Doubt:
    """Why no step is taken. `undecided`: more runs may say otherwise."""

    why: str
    undecided: bool


def refusal(gap: GapEstimate, settings: HindsightSettings) -> Doubt | None:
    """Why nothing is trained, None when the gap is positive. Whoever waits asks again with twice as many runs, so half
    of the error that is left is spent each time: from four runs on a twentieth, a fortieth and so on."""
    undecided = gap.count < settings.runs_max
    if gap.count < settings.runs_min:
        return Doubt(
            f"the gap between teacher and student was measured on {gap.count} runs, below "
            f"trainer.advantage.hindsight.runs_min = {settings.runs_min}; raise trainer.batch_experiences_min",
            undecided,
        )
    level = 2 * ERROR / min(gap.count, _TOLD_APART)
    if gap.positive and gap.chance <= level:
        return None
    return Doubt(
        f"the gap between teacher and student is {gap.mean:.4g} nats a token over {gap.count} runs, and not surely "
        f"positive: replies dealt out at random do as well in {gap.chance:.1%} (at most {level:.1%}). Told what users "
        'said next, this base answers no better. Take a larger base, or another algorithm ("reinforce++" with the '
        "rewards of turns)",
        undecided,
    )


told = estimator(Needs(hindsight=True, logprobs=True), HindsightSettings, signals=Signals(rewards=False, replies=True))(
    as_they_are
)
HINDSIGHT = Algorithm("hindsight", "clipped", {"batch_wait_s": 600.0})
