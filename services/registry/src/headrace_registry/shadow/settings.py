"""The section `[registry.rollout.shadow]`: tenants and limits of the shadow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, SecretStr, model_validator

from headrace_runtime.process.programs import VariableName
from headrace_runtime.settings.sections import Section

Label = Annotated[str, Field(min_length=1, max_length=128)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@dataclass(frozen=True, slots=True)
class RerunBounds:
    """Limits of one rerun."""

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
    tool_timeout_s: Positive = 30.0
    """Seconds that one call of this program may take."""
    tool_result_bytes_max: Annotated[int, Field(ge=256)] = 262_144
    """Bytes of the longest line that this program may print."""
    prompts_per_minute: Positive = 6.0
    """Number of prompts that are taken from the traffic per minute."""
    tokens_max: Annotated[int, Field(ge=1)] = 2_000_000
    """Tokens of prompts and answers that the shadow of one rollout may take; then no further prompt is taken."""
    prompt_tokens_max: Annotated[int, Field(ge=1)] = 8192
    """Tokens of a prompt beyond which it is left out."""
    answer_tokens_max: Annotated[int, Field(ge=1)] = 1024
    """Tokens of one answer; a user's own limit applies if it is smaller."""
    rerun_tokens_max: Annotated[int, Field(ge=1)] = 32_768
    """Tokens of all model calls for one prompt and one version."""
    steps_max: Annotated[int, Field(ge=1, le=256)] = 8
    """Number of model calls for one prompt and one version."""
    concurrency: Annotated[int, Field(ge=1, le=64)] = 2
    """Number of prompts that are answered at a time."""
    attempts: Annotated[int, Field(ge=1)] = 3
    """Number of attempts to answer a prompt before it is left out."""
    patience_s: Positive = 300.0
    """Seconds that one call waits while replicas are busy with users."""
    call_timeout_s: Positive = 120.0
    """Seconds that one model call may take."""

    @property
    def bounds(self) -> RerunBounds:
        return RerunBounds(self.steps_max, self.rerun_tokens_max)

    @property
    def keys(self) -> dict[str, str]:
        """The gateway's key of each tenant."""
        return {tenant.tenant: tenant.key.get_secret_value() for tenant in self.tenants}

    @model_validator(mode="after")
    def _has_program_for_tools(self) -> Self:
        if self.read_only_tools and not self.tools_command:
            raise ValueError(
                f"read_only_tools names {', '.join(self.read_only_tools)} and tools_command is empty; set the "
                "program that calls them, or remove them, so that recorded results are replayed"
            )
        names = [tenant.tenant for tenant in self.tenants]
        if len(set(names)) < len(names):
            raise ValueError(f"tenants {', '.join(names)}: name each tenant once")
        return self
