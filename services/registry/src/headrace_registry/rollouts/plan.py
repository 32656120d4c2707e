"""What a rollout has declared before its first session: stages, guardrails, margins, error rates, limits."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from itertools import pairwise
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from headrace_registry import spending
from headrace_registry.rollouts import metrics
from headrace_registry.rollouts.metrics import Metric
from headrace_registry.shadow.demands import Demands
from headrace_runtime.settings import Section
from headrace_schemas.base import Finite, Model, Text

Look = Literal["shadow", "maturity", "closing"]
"""When a unit is read: beside the champion and unseen, when it is mature, and when it is closed."""

Probability = Annotated[Finite, Field(gt=0, le=0.5)]
Positive = Annotated[Finite, Field(gt=0)]
Bounds = tuple[Finite, Finite]
_SHADOW, _CLOSING = Fraction(1, 10), Fraction(1, 10)
"""Of β. Most is for the reading that comes first on live traffic: harm is to be found soon."""
_REWARDS = ("reward", "success")
_SHARE_MAX = Fraction(1, 2)
_METRICS_MAX = 12
"""Each adds four numbers to a decision, which has room for 64 with those of the whole."""


class Guardrail(Model):
    """What must not get worse. Margins are absolute, in the metric's own unit."""

    metric: Text
    margin: Positive
    """A version that is this much worse is promoted with probability `alpha` at most; harm is bet on with an eye to
    differences of this size and of twice this size."""
    tolerated: Annotated[Finite, Field(ge=0)] = 0.0
    """What may be lost without being called harm."""
    weight: Positive = 1.0
    """How much of `beta` it gets, beside the others'. Half the weight costs ln 2 = 0.7 more evidence."""
    bounds: Bounds | None = None
    """Instead of the metric's own."""

    @property
    def measured(self) -> Metric:
        """Raises `ValueError` when nobody announces it."""
        return metrics.named(self.metric).within(self.bounds)


class Success(Model):
    """What a version is promoted for: one of these is enough."""

    metric: Text
    kind: Literal["improved", "not_inferior"] = "not_inferior"
    margin: Positive
    """`not_inferior`: less than this worse. `improved`: better at all, and bet on with an eye to gains of this size."""
    bounds: Bounds | None = None

    @property
    def measured(self) -> Metric:
        return metrics.named(self.metric).within(self.bounds)


class RolloutStage(Model):
    """A share of the units, and what has to have happened before the next stage (or, in the last one, the end)."""

    share: Annotated[Fraction, Field(gt=0, le=_SHARE_MAX)]
    """Control gets as much. Everybody, 100 %, is what a promotion brings."""
    units_min: Annotated[int, Field(ge=0)] = 0
    """Mature units of the candidate, since the beginning."""
    duration_min_s: Annotated[Finite, Field(ge=0)] = 0.0
    """In this stage."""


def _stages(*shares: Fraction) -> tuple[RolloutStage, ...]:
    return tuple(RolloutStage(share=share, units_min=20 * number) for number, share in enumerate(shares, 1))


class RolloutPlan(Section):
    """A rollout's rules. A fixed split (A/B) is one stage; with `promotes` false its end changes nothing."""

    unit: Literal["session", "user"] = "session"
    """Who is drawn into an arm: sessions, or users (the request's `user`, `X-User-Id` or `metadata.user_id`; a session
    whose calls name nobody is a user of its own)."""
    slots: Annotated[int, Field(ge=1, le=8)] = 1
    """How many candidates there may be at a time. Each has a control of its own size within one block of units, so a
    candidate gets 1 / (slots + 1) of them at most, whatever its stage says. No larger while anything is under way."""
    split: Literal["even", "adaptive"] = "even"
    """`adaptive`: of several candidates at a time, those that are probably not the best get less than their stage has
    (Thompson's rule), and the leader all of it. Needs `unit = "session"`: a share that shrinks would move users."""
    floor: Annotated[Fraction, Field(gt=0, le=1)] = Fraction(1, 8)
    """`split = "adaptive"`: the part of its stage's share that a candidate always keeps."""
    shadow_units: Annotated[int, Field(ge=0, le=100_000)] = 0
    """So many prompts of users' sessions both versions answer anew, unseen by users, before the candidate gets any of
    them; 0: no shadow. `registry.rollout.shadow` says whose, and what it may take."""
    shadow_duration_max_s: Positive = 21_600.0
    """After so long the canary begins with what the shadow has found."""
    shadow_demands: Demands = Demands()
    """What has to be there before a shadow says anything about users."""
    stages: tuple[RolloutStage, ...] = Field(
        default=_stages(Fraction(1, 100), Fraction(1, 10), Fraction(1, 2)), min_length=1, max_length=16
    )
    """The ramp: `share` of the units, then `units_min` of the candidate and `duration_min_s` before the next one."""
    exposure_max: Annotated[Fraction, Field(gt=0, le=_SHARE_MAX)] = Fraction(1, 10)
    """The share of the units that may meet a version about which nothing is known. A larger one waits until sessions
    have ruled out, for each guardrail, so large a loss that no more is at stake: five times the share needs the loss to
    be less than a fifth of the worst that the metric can be."""
    experiences: Literal["keep", "exclude"] = "keep"
    """What a version answered that its rollout took back: `keep` trains on it, as on anything that went badly,
    `exclude` drops it and takes back what was trained on it."""
    guardrails: tuple[Guardrail, ...] = Field(
        default=(
            Guardrail(metric="reward", margin=0.1, weight=12),
            Guardrail(metric="missing", margin=0.1, weight=2),
            Guardrail(metric="tool_errors", margin=0.1),
            Guardrail(metric="loops", margin=0.1),
        ),
        min_length=1,
        max_length=8,
    )
    """What must not get worse: `metric`, absolute `margin`, `tolerated`, `weight` of beta, `bounds`."""
    successes: tuple[Success, ...] = Field(default=(Success(metric="reward", margin=0.1),), min_length=1, max_length=4)
    """What a version is promoted for, one of them: `metric`, `kind` (improved, not_inferior), `margin`, `bounds`."""
    watched: tuple[Text, ...] = Field(default=("success", "latency", "satisfaction"), max_length=8)
    """Metrics that are measured and shown beside these; they decide nothing."""
    alpha: Probability = 0.05
    """Probability of promoting wrongly, over all versions of a family together."""
    beta: Probability = 0.05
    """Probability that a version without harm is rolled back."""
    sample_ratio_error: Probability = 0.01
    """Probability that sound traffic is held for arms of the wrong size."""
    uneven: Annotated[Finite, Field(gt=0, le=1)] = 0.15
    """A version whose arms differ by this share of both together is promoted with probability `alpha` at most: that of
    candidates who lose a quarter of their sessions, say. What is lost cannot be compared."""
    maturity_s: Positive = 600.0
    """Age at which a unit is read first, with whatever rewards it has by then."""
    closing_s: Positive = 7200.0
    """Age at which it is read for the last time: what is said or revised later moves nothing."""
    window_s: Annotated[Finite, Field(ge=0)] = 0.0
    """`unit = "user"`: for how long after a user's first session further ones belong to the same unit."""
    units_max: Annotated[int, Field(ge=1)] = 20_000
    """After so many mature units of the candidate the rollout is held."""
    duration_max_s: Positive = 604_800.0
    """After so long it is held."""
    promotes: bool = True
    """Whether what is shown good enough takes over by itself; else it ends in hold, for an operator to promote."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.closing_s < self.maturity_s:
            raise ValueError(f"closing_s = {self.closing_s:g} is before maturity_s = {self.maturity_s:g}")
        if self.unit == "session" and self.window_s:
            raise ValueError(f'window_s = {self.window_s:g} is for unit = "user"; leave it 0')
        if self.split == "adaptive" and self.unit != "session":
            raise ValueError('split = "adaptive" needs unit = "session": a share that shrinks would move users')
        shares = [stage.share for stage in self.stages]
        if any(later <= earlier for earlier, later in pairwise(shares)):
            raise ValueError(f"shares {', '.join(map(str, shares))}: each stage has more than the one before")
        declared: tuple[Guardrail | Success, ...] = (*self.guardrails, *self.successes)
        for one in declared:
            if one.margin > one.measured.width:
                raise ValueError(
                    f"margin {one.margin:g} of {one.metric}: its bounds are only {one.measured.width:g} apart"
                )
        for guardrail in self.guardrails:
            if guardrail.tolerated >= guardrail.margin:
                raise ValueError(
                    f"tolerated = {guardrail.tolerated:g} of {guardrail.metric}: keep it below the margin "
                    f"{guardrail.margin:g}, which must not be promoted"
                )
        self._distinct()
        return self

    def _distinct(self) -> None:
        guarded = [one.metric for one in self.guardrails]
        for names in (guarded, [one.metric for one in self.successes]):
            if len(set(names)) < len(names):
                raise ValueError(f"{', '.join(names)}: name each metric once")
        together = {*guarded, *(one.metric for one in self.successes), *self.watched}
        if len(together) > _METRICS_MAX:
            raise ValueError(f"{len(together)} metrics: {_METRICS_MAX} at most, so that a decision can say all of them")
        for name in self.watched:
            metrics.named(name)
        bounds = {one.metric: one.bounds for one in self.guardrails}
        for success in self.successes:
            if bounds.get(success.metric, success.bounds) != success.bounds:
                raise ValueError(
                    f"{success.metric} has other bounds as a guardrail than as a success; give it one pair"
                )
        rewarded = {name for name in (*guarded, *(one.metric for one in self.successes)) if _stem(name) in _REWARDS}
        if rewarded and not any(_stem(name) == "missing" for name in guarded):
            raise ValueError(
                f"{', '.join(sorted(rewarded))} without a guardrail on missing: sessions without a reward are not "
                "compared, so a version that loses its bad ones would look better; add one"
            )

    def to_rule_out(self, share: Fraction) -> Fraction | None:
        """The loss, as a part of the worst that a metric can be, that a candidate's sessions have to rule out before it
        gets `share`; None: nothing. Share times loss is never more than `exposure_max` times the worst."""
        return None if share <= self.exposure_max else self.exposure_max / share

    @property
    def looks(self) -> Mapping[Look, Fraction]:
        """The readings of a unit with their shares of β."""
        shadow = _SHADOW if self.shadow_units else Fraction(0)
        closing = _CLOSING if self.closing_s > self.maturity_s else Fraction(0)
        shares: dict[Look, Fraction] = {"shadow": shadow, "maturity": 1 - shadow - closing, "closing": closing}
        return {look: share for look, share in shares.items() if share}

    @property
    def last_look(self) -> Look:
        """The one that promotions rest on."""
        return "closing" if "closing" in self.looks else "maturity"

    def age_s(self, look: Look) -> float:
        """Of a unit, from its first session on."""
        return self.window_s + (self.closing_s if look == "closing" else self.maturity_s)

    def harm_error(self, guardrail: Guardrail, look: Look) -> float:
        """All of them add up to β."""
        weights = sum(one.weight for one in self.guardrails)
        return spending.harm(self.beta, guardrail.weight / weights * float(self.looks[look]))


def _stem(metric: str) -> str:
    return metric.partition(":")[0]
