"""Settings of rollouts: the sections `[registry.rollout]` and `[registry.rollout.shadow]`."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, SecretStr, model_validator

from headrace_registry.rollouts.plan import SHARE_MAX, RolloutPlan, RolloutStage
from headrace_runtime.process.programs import VariableName
from headrace_runtime.settings.sections import Section
from headrace_runtime.settings.table import Fixed
from headrace_schemas.values.base import Model, Share

Label = Annotated[str, Field(min_length=1, max_length=128)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
EVENTS_PER_UNIT_MAX = 1024
"""Maximum number of turns, rewards and feedback that are stored for one unit. Later events are ignored."""
_RERUN_STEPS_MAX = 8
"""Maximum number of model calls with which one version answers one prompt of a shadow."""
_RERUN_TOKENS_MAX = 32_768
"""Maximum number of tokens of all model calls with which one version answers one prompt of a shadow."""


@dataclass(frozen=True, slots=True)
class RerunBounds:
    """Limits on answering one prompt of a shadow with one version: model calls and tokens."""

    steps_max: int
    tokens_max: int


class ShadowTenant(Section):
    """A tenant that allows its prompts to be answered again."""

    tenant: Label = "default"
    """Name of the tenant as in `gateway.keys`."""
    key: SecretStr = SecretStr("")
    """A separate key of the gateway for that tenant, so that the shadow is charged to no other key; empty if the
    gateway is open."""


class ShadowSettings(Section):
    """How a candidate answers prompts of real sessions, unseen by their users: see `docs/shadow.md`. Set
    `rollout.shadow_units` to use it."""

    TIER: ClassVar[Literal["tuning", "limits"]] = "limits"
    FIXED: ClassVar = {"steps_max": Fixed(8)}
    PARAMETERS: ClassVar = ("concurrency",)

    tenants: tuple[ShadowTenant, ...] = ()
    """Tenants that have agreed. Prompts of other tenants are neither stored nor answered."""
    read_only_tools: tuple[Label, ...] = ()
    """Tools that a shadow may call because they have no side effects. For all other tools, recorded results are
    replayed."""
    tools_command: tuple[str, ...] = ()
    """Program that calls these tools: for each line `{"id": ..., "name": ..., "arguments": "..."}` it prints `{"id":
    ..., "result": "..."}`. `{python}` is replaced by the registry's interpreter."""
    tools_environment: tuple[VariableName, ...] = ()
    """Environment variables of the registry that this program gets in addition to the system's own."""
    prompts_per_minute: Positive = 6.0
    """Number of prompts that are taken from the traffic per minute."""
    tokens_max: Annotated[int, Field(ge=1)] = 2_000_000
    """Tokens of prompts and answers that the shadow of one rollout may take; then no further prompt is taken."""
    concurrency: Annotated[int, Field(ge=1, le=64)] = 2
    """Number of prompts that are answered at a time: few, because users have precedence, and `prompts_per_minute` is
    the limit in the long run."""

    @property
    def bounds(self) -> RerunBounds:
        return RerunBounds(_RERUN_STEPS_MAX, _RERUN_TOKENS_MAX)

    @property
    def keys(self) -> dict[str, str]:
        """API key of the gateway for each tenant, with which requests of shadows are sent."""
        return {tenant.tenant: tenant.key.get_secret_value() for tenant in self.tenants}

    @model_validator(mode="after")
    def _check_tool_program(self) -> Self:
        if self.read_only_tools and not self.tools_command:
            raise ValueError(
                f"read_only_tools names {', '.join(self.read_only_tools)} and tools_command is empty; set the "
                "program that calls them, or remove them, so that recorded results are replayed"
            )
        names = [tenant.tenant for tenant in self.tenants]
        if len(set(names)) < len(names):
            raise ValueError(f"tenants {', '.join(names)}: name each tenant once")
        return self


Kind = Literal["rolling", "canary", "ab"]


class RequestedRollout(Model):
    """Kind and share that an operator requested with a version, stored with it until its rollout begins."""

    kind: Kind | None = None
    share: Share | None = None
    """Share of a single stage that replaces the plan's stages."""


class RolloutSettings(RolloutPlan):
    """Rules for trying a version on live traffic after it has passed the gate: see `docs/rollouts.md`."""

    COMMON: ClassVar = ("kind",)
    FIXED: ClassVar = {"read_s": Fixed(0.5), "share_max": Fixed(SHARE_MAX, "end stages with this share")}
    PARAMETERS: ClassVar = ("floor", "promotes", "sample_ratio_error", "shadow_demands", "shadow_duration_max_s")

    kind: Kind = "rolling"
    """`rolling`: a version that passed the gate serves all traffic. `canary`: it gets a growing share of the traffic
    and becomes champion, is held or is rolled back by the results of its sessions. `ab`: a fixed share in one stage,
    and the end changes no role."""
    versions_per_hour_max: Annotated[int, Field(ge=1)] = 60
    """Number of rollouts of one model that may begin within an hour; further versions wait."""
    check_after_updates: Annotated[int, Field(ge=1)] = 1
    """Number of versions that must be published before the newest of them is tried; the others are skipped. A version
    that an operator requests is tried at once."""
    shadow: ShadowSettings = ShadowSettings()

    @model_validator(mode="after")
    def _check_feasibility(self) -> Self:
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
        """Return the request of an operator, which is stored as JSON or None. If it names no kind of rollout, the
        configured kind is used."""
        request = RequestedRollout.model_validate_json(stored) if stored else RequestedRollout()
        return request if request.kind else request.model_copy(update={"kind": self.kind})

    def plan(self, request: RequestedRollout) -> RolloutPlan:
        """Return the plan of a rollout for an operator's request. Raises `ValueError` for a share that is not
        allowed."""
        kind = request.kind or self.kind
        stages = self.stages
        if request.share is not None:
            share = Fraction(request.share)
            if not 0 < share <= SHARE_MAX:
                raise ValueError(f"share {share}: more than 0, and {SHARE_MAX} at most")
            stages = (RolloutStage(share=share, units_min=stages[-1].units_min),)
        elif kind == "ab":
            stages = stages[-1:]
        fields = {name: getattr(self, name) for name in RolloutPlan.model_fields}
        return RolloutPlan(**{**fields, "stages": stages, "promotes": self.promotes and kind != "ab"})
