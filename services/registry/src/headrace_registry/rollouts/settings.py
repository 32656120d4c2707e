"""The section `[registry.rollout]`: the plan of future rollouts, and the limits of all of them."""

from __future__ import annotations

from fractions import Fraction
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from headrace_registry.rollouts.plan import RolloutPlan, RolloutStage
from headrace_registry.shadow.settings import ShadowSettings
from headrace_schemas.values.base import Model, Share

Kind = Literal["rolling", "canary", "ab"]


class RequestedRollout(Model):
    """Kind and share that an operator requested with a version, stored with it until its rollout begins."""

    kind: Kind | None = None
    share: Share | None = None
    """Share of a single stage that replaces the plan's stages."""


class RolloutSettings(RolloutPlan):
    """Rules for trying a version on live traffic after it has passed the gate: see `docs/rollouts.md`."""

    COMMON: ClassVar = ("kind",)

    kind: Kind = "rolling"
    """`rolling`: a version that passed the gate serves all traffic. `canary`: it gets a growing share of the traffic
    and becomes champion, is held or is rolled back by the results of its sessions. `ab`: a fixed share in one stage,
    and the end changes no role."""
    share_max: Annotated[Fraction, Field(gt=0, le=Fraction(1, 2))] = Fraction(1, 2)
    """Largest share of all units for one candidate, whatever `stages` allow and its sessions show."""
    versions_per_hour_max: Annotated[int, Field(ge=1)] = 60
    """Number of rollouts of one model that may begin within an hour; further versions wait."""
    check_after_updates: Annotated[int, Field(ge=1)] = 1
    """Number of versions that must be published before the newest of them is tried; the others are skipped. A version
    that an operator requests is tried at once."""
    events_per_unit_max: Annotated[int, Field(ge=16)] = 1024
    """Number of turns, rewards and feedback that are stored for one unit until it is closed; later ones do not
    count."""
    rollouts_kept_max: Annotated[int, Field(ge=1)] = 50
    """Number of ended rollouts of a model whose readings and charts are stored."""
    reports_kept_max: Annotated[int, Field(ge=0)] = 200
    """Number of charts that are stored under `registry/rollouts` of the data directory, one for each step of a rollout;
    the oldest are deleted. Needs matplotlib. 0 writes none."""
    read_s: Annotated[float, Field(gt=0, le=60)] = 0.5
    """Seconds between reads of the topics while a rollout is under way."""
    shadow: ShadowSettings = ShadowSettings()

    @model_validator(mode="after")
    def _can_be_done(self) -> Self:
        if self.shadow_units and not self.shadow.tenants:
            raise ValueError(
                f"shadow_units = {self.shadow_units}, but shadow.tenants names no tenant whose prompts may be answered "
                "again; name the tenants, or set it to 0"
            )
        first = self.stages[0].share
        if self.kind == "canary" and first > self.exposure_max:
            raise ValueError(
                f"the first of stages has {first} of the units, exposure_max allows {self.exposure_max} for a version "
                "about which nothing is known; begin with less, or raise exposure_max"
            )
        if self.kind == "ab" and len(self.stages) != 1:
            raise ValueError(f'kind = "ab" has one fixed share, stages has {len(self.stages)}; leave one of them')
        return self

    def requested_rollout(self, stored: str | None) -> RequestedRollout:
        """Return the stored request of an operator, with the configured kind where it has none."""
        request = RequestedRollout.model_validate_json(stored) if stored else RequestedRollout()
        return request if request.kind else request.model_copy(update={"kind": self.kind})

    def plan(self, request: RequestedRollout) -> RolloutPlan:
        """Return the rules of a rollout that begins now. Raises `ValueError` for a share that is not allowed."""
        kind = request.kind or self.kind
        stages = self.stages
        if request.share is not None:
            share = Fraction(request.share)
            if not 0 < share <= self.share_max:
                raise ValueError(f"share {share}: more than 0, and share_max = {self.share_max} at most")
            stages = (RolloutStage(share=share, units_min=stages[-1].units_min),)
        elif kind == "ab":
            stages = stages[-1:]
        fields = {name: getattr(self, name) for name in RolloutPlan.model_fields}
        return RolloutPlan(
            **{**fields, "stages": self._limit_stages(stages), "promotes": self.promotes and kind != "ab"}
        )

    def _limit_stages(self, stages: tuple[RolloutStage, ...]) -> tuple[RolloutStage, ...]:
        """Limit the stages to `share_max`: all stages beyond it become one last stage with that share."""
        limited = [stage for stage in stages if stage.share < self.share_max]
        beyond = [stage for stage in stages if stage.share >= self.share_max]
        if beyond:
            limited.append(beyond[-1].model_copy(update={"share": self.share_max}))
        return tuple(limited)
