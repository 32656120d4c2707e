"""`hindsight`: the model with the user's next message in its prompt teaches the model without it (self-distillation:
arXiv:2601.20802, equation 1; of users' replies arXiv:2603.12273; of next states arXiv:2603.10165).

    A_n = coefficient clip(log pi_base(n | prompt, reply) - log mu(n | prompt), +- limit)    mu: the engine
    L   = - 1/N sum_n min(rho A, clip(rho) A)                                                over a contradicted answer

or, with `compared = "distributions"`, in the mean over all words v at place n:

    B_nv = coefficient clip(log pi_base(v | prompt, reply) - log pi(v | prompt), +- limit)   pi: the present weights
    L    = - 1/N sum_n sum_v pi(v) B_nv                                                      B has no gradient

and over accepted answers too, whose teacher is the base without a reply: they keep the policy near the base where it
was right. The model's answer to the reply is then trained as if there had been no reply, in place of that answer a of
the run which the reply was about:

    a = argmax_a mean_n log pi_base(n | prompt of a)      of the contradicted answer and the `earlier_max` before it

The teacher is the base, so it never changes; `reply` is the user's next message, put before the answer's opening. An
answer is contradicted or accepted by the reward of its turn, e.g. of the reward function `signals`. Needs the base
(`hindsight`) and logprobs, and no reward of the run.

Before each step the gap between teacher and student is measured, on the answers that the model gave to the replies:

    d   = mean_n log pi_base(n | prompt, reply) - max(mean_n log pi_base(n | prompt, other runs' replies),
                                                      mean_n log pi_base(n | prompt))        of run i its mean, d_i

A base that cannot use replies has d = 0, and replies that belong elsewhere have no positive d. A step is taken only if
d is positive in the mean and randomly permuted replies would rarely reach it (`algorithms.gap`): with few runs a step
waits for more of them, with `runs_max` it is refused.

With A, accepted answers are trained with an advantage of 0. They are the guard set: their mean drop below the base is
measured after each step (`trainer.health.guard_drop_max`).

The teacher never changes, so a withdrawn reply is trained once more with the opposite sign: with A exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from headrace_runtime.settings.sections import Section
from headrace_trainer.algorithms.estimators import estimator, reward_as_advantage
from headrace_trainer.algorithms.gap import GapEstimate
from headrace_trainer.algorithms.needs import REPLIES, Needs
from headrace_trainer.algorithms.presets import Algorithm

if TYPE_CHECKING:
    from headrace_trainer.algorithms.settings import AdvantageSettings


ERROR = 0.1
"""Bound on the probability that training begins although replies have no specific information, however long it
waits."""
GUARD_ANSWERS_MAX = 64
"""Size of the guard set; the newest accepted answers are kept."""
RUNS_MIN = 4
"""Number of runs with a contradicted answer that the gap test needs: of fewer no permutation has a small p-value."""
_LEVEL_RUNS_MAX = 256
"""Number of runs from which on the level stays constant: the permutations cannot resolve smaller p-values."""


class HindsightSettings(Section):
    """`[trainer.advantage.hindsight]`."""

    FIXED: ClassVar = {"guard_answers": "64", "runs_min": "4"}

    contradicted_max: float = 0.25
    """A turn whose reward is at most this was contradicted, if a message of the user follows."""
    accepted_min: float = 0.75
    """A turn whose reward is at least this was accepted."""
    coefficient: Annotated[float, Field(gt=0)] = 1.0
    """The advantage of a token to which the teacher gives one more nat of logprob."""
    compared: Literal["tokens", "distributions"] = "tokens"
    """`tokens` compares the teacher's logprobs of the sampled tokens. `distributions` compares those of all words at
    each position with the present weights' (B above). It learns from a fraction of the sessions; withdrawals are
    reversed to first order only. Needs an output head that is one matrix, and `loss.sequence_mask_max` = 0."""
    earlier_max: Annotated[int, Field(ge=0, le=64)] = 8
    """With `distributions`: how many answers before the contradicted one, since the user's previous message, may be the
    one that the reply is about. 0: the reply is about the contradicted one."""
    limit: Annotated[float, Field(gt=0)] = 5.0
    """Bound on the difference of a token, in nats, so that a token that the teacher excludes has a bounded effect."""
    runs_max: Annotated[int, Field(ge=RUNS_MIN)] = 64
    """Number of runs at which a gap that is not surely positive stops training. With fewer the batch waits, and is cut
    again when there are twice as many experiences."""

    @model_validator(mode="after")
    def _bounds_are_apart(self) -> Self:
        if self.contradicted_max >= self.accepted_min:
            raise ValueError(f"contradicted_max is not below accepted_min = {self.accepted_min:g}")
        return self


def hindsight_of(settings: AdvantageSettings) -> HindsightSettings:
    """Return the section of the algorithm."""
    section = settings.of("hindsight")
    assert isinstance(section, HindsightSettings)
    return section


@dataclass(frozen=True, slots=True)
class StepDecision:
    """The reason why no step is taken. `undecided`: the test may pass with more runs."""

    why: str
    undecided: bool


def refusal(gap: GapEstimate, settings: HindsightSettings) -> StepDecision | None:
    """Return the reason for which no step may be taken, None when the gap is surely positive.

    A batch that waits is tested again with twice as many runs, so each test spends half of the remaining error
    probability: a twentieth at four runs, then a fortieth and so on.
    """
    undecided = gap.count < settings.runs_max
    if gap.count < RUNS_MIN:
        return StepDecision(
            f"the gap between teacher and student was measured on {gap.count} runs, and {RUNS_MIN} are needed; raise "
            "trainer.batch_experiences_min",
            undecided,
        )
    level = 2 * ERROR / min(gap.count, _LEVEL_RUNS_MAX)
    if gap.is_positive and gap.p_value <= level:
        return None
    return StepDecision(
        f"the gap between teacher and student is {gap.mean:.4g} nats a token over {gap.count} runs, and not surely "
        f"positive: randomly permuted replies reach it in {gap.p_value:.1%} (at most {level:.1%}) of the cases. This "
        "base does not answer better when it sees users' next messages. Take a larger base, or another algorithm "
        '("reinforce++" with the rewards of turns)',
        undecided,
    )


told = estimator(Needs(hindsight=True, logprobs=True), HindsightSettings, signals=REPLIES)(reward_as_advantage)
HINDSIGHT = Algorithm("hindsight", "clipped", {"batch_wait_s": 600.0})
