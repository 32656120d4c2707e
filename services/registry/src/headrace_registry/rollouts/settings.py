"""The section `[registry.rollout]`: the plan of the rollouts to come, and what bounds all of them."""

from __future__ import annotations

from fractions import Fraction
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from headrace_registry.rollouts.plan import RolloutPlan, RolloutStage
from headrace_registry.shadow.settings import ShadowSettings
from headrace_schemas.base import Model, Share

Kind = Literal["rolling", "canary", "ab"]


class Wish(Model):
    """What an operator asked for with a version: stored with the version until its rollout begins."""

    kind: Kind | None = None
    share: Share | None = None
    """One stage with this share, in place of the plan's."""


class RolloutSettings(RolloutPlan):
    """What a version that passed the gate has to show on live traffic: see `docs/rollouts.md`."""

    COMMON: ClassVar = ("kind",)

    kind: Kind = "rolling"
    """`rolling`: a version that passed the gate serves everybody. `canary`: it gets a growing share of the traffic
    and becomes champion, is held or is taken back by what its sessions show. `ab`: a fixed share, `stages` is one, and
    the end changes nothing."""
    share_max: Annotated[Fraction, Field(gt=0, le=Fraction(1, 2))] = Fraction(1, 2)
    """The most of all units that one candidate gets, whatever `stages` say and its sessions show."""
    versions_per_hour_max: Annotated[int, Field(ge=1)] = 60
    """Rollouts that may begin in an hour, of one model; further versions wait."""
    check_after_updates: Annotated[int, Field(ge=1)] = 1
    """Versions that have to be published before the newest of them is tried; those between are passed over. Versions
    that an operator asks for are tried at once."""
    events_per_unit_max: Annotated[int, Field(ge=16)] = 1024
    """Turns, rewards and feedback that are kept of one unit until it is closed; later ones do not count."""
    rollouts_kept_max: Annotated[int, Field(ge=1)] = 50
    """Ended rollouts of a model whose readings, and so whose charts, are kept."""
    reports_kept_max: Annotated[int, Field(ge=0)] = 200
    """Pictures that are kept under `registry/rollouts` of the data directory, one for each step of a rollout; the
    oldest go. Needs matplotlib. 0 writes none."""
    read_s: Annotated[float, Field(gt=0, le=60)] = 0.5
    """How often the topics are read while anything is under way."""
    shadow: ShadowSettings = ShadowSettings()

    @model_validator(mode="after")
    def _can_be_done(self) -> Self:
        if self.shadow_units and not self.shadow.tenants:
            raise ValueError(
                f"shadow_units = {self.shadow_units}, and shadow.tenants names nobody whose prompts may be answered "
                "anew; name them, or leave it 0"
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

    def wanted(self, wish: str | None) -> Wish:
        """The kind of a rollout that is to begin, `rolling` for none, and the share if it is a fixed one."""
        given = Wish.model_validate_json(wish) if wish else Wish()
        return given if given.kind else given.model_copy(update={"kind": self.kind})

    def plan(self, wish: Wish) -> RolloutPlan:
        """The rules of a rollout that begins now. Raises `ValueError` for a share that it cannot have."""
        kind = wish.kind or self.kind
        stages = self.stages
        if wish.share is not None:
            share = Fraction(wish.share)
            if not 0 < share <= self.share_max:
                raise ValueError(f"share {share}: more than 0, and share_max = {self.share_max} at most")
            stages = (RolloutStage(share=share, units_min=stages[-1].units_min),)
        elif kind == "ab":
            stages = stages[-1:]
        fields = {name: getattr(self, name) for name in RolloutPlan.model_fields}
        return RolloutPlan(**{**fields, "stages": self._within(stages), "promotes": self.promotes and kind != "ab"})

    def _within(self, stages: tuple[RolloutStage, ...]) -> tuple[RolloutStage, ...]:
        """Cut off at `share_max`: what is beyond it becomes one last stage with as much."""
        kept = [stage for stage in stages if stage.share < self.share_max]
        beyond = [stage for stage in stages if stage.share >= self.share_max]
        if beyond:
            kept.append(beyond[-1].model_copy(update={"share": self.share_max}))
        return tuple(kept)
