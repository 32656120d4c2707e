"""The section `[registry.rollout.shadow]`: whose prompts may be answered anew, and what that may take."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, SecretStr, model_validator

from headrace_registry.shadow.rerun import RerunBounds
from headrace_runtime.program_environment import VariableName
from headrace_runtime.settings import Section

Label = Annotated[str, Field(min_length=1, max_length=128)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class ShadowTenant(Section):
    """A tenant whose prompts may be answered anew."""

    tenant: Label = "default"
    """As in `gateway.keys`."""
    key: SecretStr = SecretStr("")
    """A key of the gateway of its own, of that tenant, so that nobody else pays; empty where the gateway is open."""


class ShadowSettings(Section):
    """How a candidate answers prompts of real sessions, unseen by their users: see `docs/shadow.md`. On with
    `rollout.shadow_units`."""

    TIER: ClassVar[Literal["tuning", "limits"]] = "limits"

    tenants: tuple[ShadowTenant, ...] = ()
    """Who has agreed: nobody else's prompt is kept or answered."""
    read_only_tools: tuple[Label, ...] = ()
    """Tools that a shadow may really call, because they change nothing. Of all others only recorded results are
    replayed."""
    tools_command: tuple[str, ...] = ()
    """A program that calls these tools: for each line `{"id": ..., "name": ..., "arguments": "..."}` it prints
    `{"id": ..., "result": "..."}`. `{python}` becomes the registry's interpreter."""
    tools_environment: tuple[VariableName, ...] = ()
    """Environment variables of the registry that this program gets besides the system's own."""
    tool_timeout_s: Positive = 30.0
    """How long one call of it may take."""
    tool_result_bytes_max: Annotated[int, Field(ge=256)] = 262_144
    """Longest line that it may print."""
    prompts_per_minute: Positive = 6.0
    """How many prompts are taken from the traffic."""
    tokens_max: Annotated[int, Field(ge=1)] = 2_000_000
    """Tokens of prompts and answers that the shadow of one rollout may take; then no further prompt is taken."""
    prompt_tokens_max: Annotated[int, Field(ge=1)] = 8192
    """Longer prompts are left out."""
    answer_tokens_max: Annotated[int, Field(ge=1)] = 1024
    """Of one answer; a user's own limit counts where it is smaller."""
    rerun_tokens_max: Annotated[int, Field(ge=1)] = 32_768
    """Of one prompt's calls of the model together, for one version."""
    steps_max: Annotated[int, Field(ge=1, le=256)] = 8
    """Calls of the model for one prompt, one version."""
    concurrency: Annotated[int, Field(ge=1, le=64)] = 2
    """Prompts that are answered at a time."""
    attempts: Annotated[int, Field(ge=1)] = 3
    """How often a prompt is tried before it is left out."""
    patience_s: Positive = 300.0
    """How long one call waits for replicas that have time beside users."""
    call_timeout_s: Positive = 120.0
    """How long one call of the model may take."""

    @property
    def bounds(self) -> RerunBounds:
        return RerunBounds(self.steps_max, self.rerun_tokens_max)

    @property
    def keys(self) -> dict[str, str]:
        """By tenant."""
        return {one.tenant: one.key.get_secret_value() for one in self.tenants}

    @model_validator(mode="after")
    def _somebody_calls_the_tools(self) -> Self:
        if self.read_only_tools and not self.tools_command:
            raise ValueError(
                f"read_only_tools names {', '.join(self.read_only_tools)} and tools_command is empty; say which "
                "program calls them, or leave them out: recorded results are replayed then"
            )
        names = [one.tenant for one in self.tenants]
        if len(set(names)) < len(names):
            raise ValueError(f"tenants {', '.join(names)}: name each once")
        return self
