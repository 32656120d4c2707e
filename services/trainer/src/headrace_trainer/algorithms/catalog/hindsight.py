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
d is positive in the mean and randomly permuted replies would rarely reach it (`GapEstimate`): with few runs a step
waits for more of them, with `runs_max` it is refused.

With A, accepted answers are trained with an advantage of 0. They are the guard set: their mean drop below the base is
measured after each step (`trainer.health.guard_drop_max`).

The teacher never changes, so a withdrawn reply is trained once more with the opposite sign: with A exactly.

`GapEstimate` measures how much a teacher gains from replies, and tests the gain by permutations. Each answer that
followed a reply is graded after its own reply, after the replies of the other runs of its block, and after none. If
replies had no specific information, they could be permuted among the runs of a block and the answers would be as
likely. `PERMUTATIONS` such permutations are drawn: the share of them in which the answers are at least as likely is the
p-value of the gain (a permutation test: Fisher, "The Design of Experiments", 1935, section 21). It is exact for any
number of runs and any distribution of values. With five runs one permutation in 120 is the identity.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from headrace_runtime.settings.sections import Section
from headrace_runtime.settings.table import Fixed
from headrace_trainer.algorithms.estimators import estimator, reward_as_advantage
from headrace_trainer.algorithms.presets import REPLIES, Algorithm, Needs

if TYPE_CHECKING:
    from headrace_trainer.algorithms.settings import AdvantageSettings


Floats = NDArray[np.float64]
BLOCK = 8
"""Largest number of runs among which replies are permuted. It bounds the cost, which grows with the square of a
block."""
PERMUTATIONS = 1999
_ROUNDING = 1e-6
"""Nats per token. The same tokens differ by less between two forward passes."""


@dataclass(frozen=True, slots=True)
class ReplyBlock:
    """Mean logprobs per token of `B` answers under the base model: after each of the block's replies, and after none.

    Comparing them shows whether an answer became more likely because of its own reply or because of any reply.
    """

    with_reply_BB: Floats
    """The answer of a run (row) after the reply of a run (column)."""
    without_reply_B: Floats
    """Each answer without a reply."""

    @property
    def gaps(self) -> Floats:
        """Gain of each run: mean logprob of its answer after its own reply, minus the larger of two others: the mean
        over the other runs' replies, and without a reply.
        """
        own_B = self.with_reply_BB.diagonal()
        others_B = (self.with_reply_BB.sum(1) - own_B) / max(1, len(own_B) - 1)
        return np.asarray(own_B - np.maximum(others_B, self.without_reply_B))


@dataclass(frozen=True, slots=True)
class GapEstimate:
    """Estimate of the gain from users' replies, stored as sums over the runs measured so far."""

    count: int = 0
    total: float = 0.0
    observed: float = 0.0
    """Sum over runs of the mean logprobs after the own replies."""
    permuted: tuple[float, ...] = field(default=(0.0,) * PERMUTATIONS, repr=False)
    """The same sum in each permutation."""

    def plus(self, blocks: Iterable[ReplyBlock]) -> GapEstimate:
        """Return the estimate with the runs of `blocks` added. Equal blocks in equal order get equal permutations."""
        estimate = self
        for block in blocks:
            estimate = estimate._with(block)
        return estimate

    def _with(self, block: ReplyBlock) -> GapEstimate:
        runs_B = np.arange(len(block.without_reply_B))
        deals_KB = np.random.default_rng(self.count).permuted(np.tile(runs_B, (PERMUTATIONS, 1)), axis=1)
        dealt_K = np.asarray(self.permuted) + block.with_reply_BB[runs_B, deals_KB].sum(1)
        return GapEstimate(
            self.count + len(runs_B),
            self.total + float(block.gaps.sum()),
            self.observed + float(block.with_reply_BB[runs_B, runs_B].sum()),
            tuple(dealt_K.tolist()),
        )

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0

    @property
    def p_value(self) -> float:
        """Probability that replies without specific information reach at least this gain (permutation test)."""
        as_well = np.asarray(self.permuted) >= self.observed - _ROUNDING * self.count
        return float(1 + as_well.sum()) / (1 + PERMUTATIONS)

    @property
    def is_positive(self) -> bool:
        """Whether the mean gain exceeds rounding errors."""
        return math.isfinite(self.mean) and self.mean > _ROUNDING


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
    """Settings of the algorithm `hindsight`, which learns from users' replies, section
    `[trainer.advantage.hindsight]`.
    """

    FIXED: ClassVar = {"guard_answers": Fixed(64), "runs_min": Fixed(4)}
    PARAMETERS: ClassVar = ("accepted_min", "coefficient", "contradicted_max", "earlier_max", "limit", "runs_max")

    contradicted_max: float = 0.25
    """A turn whose reward is at most this was contradicted, if a message of the user follows. Rewards of turns are
    thumbs, 0 or 1, or means of them."""
    accepted_min: float = 0.75
    """A turn whose reward is at least this was accepted."""
    coefficient: Annotated[float, Field(gt=0)] = 1.0
    """The advantage of a token to which the teacher gives one more nat of logprob: the unit, as the learning rate
    scales it."""
    compared: Literal["tokens", "distributions"] = "tokens"
    """`tokens` compares the teacher's logprobs of the sampled tokens. `distributions` compares those of all words at
    each position with the present weights' (B above). It learns from a fraction of the sessions; withdrawals are
    reversed to first order only. Needs an output head that is one matrix, and `loss.sequence_mask_max` = 0."""
    earlier_max: Annotated[int, Field(ge=0, le=64)] = 8
    """With `distributions`: how many answers before the contradicted one, since the user's previous message, may be the
    one that the reply is about. 0: the reply is about the contradicted one. Each costs a forward pass of the base."""
    limit: Annotated[float, Field(gt=0)] = 5.0
    """Bound on the difference of a token, in nats, so that a token that the teacher excludes has a bounded effect: a
    factor of 150 in its probability."""
    runs_max: Annotated[int, Field(ge=RUNS_MIN)] = 64
    """Number of runs at which a gap that is not surely positive stops training. With fewer the batch waits, and is cut
    again when there are twice as many experiences."""

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        if self.contradicted_max >= self.accepted_min:
            raise ValueError(
                f"contradicted_max = {self.contradicted_max:g}: must be below accepted_min = {self.accepted_min:g}"
            )
        return self


def hindsight_of(settings: AdvantageSettings) -> HindsightSettings:
    """Return the settings of the algorithm, `[trainer.advantage.hindsight]`."""
    section = settings.of("hindsight")
    assert isinstance(section, HindsightSettings)
    return section


@dataclass(frozen=True, slots=True)
class StepDecision:
    """Reason (`why`) not to take a training step of `hindsight`: the teacher's gain from replies is not significant.

    `undecided` is whether more runs may still make it significant.
    """

    why: str
    undecided: bool


def refusal(gap: GapEstimate, settings: HindsightSettings) -> StepDecision | None:
    """Return the reason not to take a step, or None if the gap between teacher and student is significantly positive.

    A batch that waits is tested again with twice as many runs, so each test may use half of the remaining error
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
