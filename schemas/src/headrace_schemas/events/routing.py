"""Events of `routing` and `replicas` (both compacted): served versions, and the replicas that serve them."""

from __future__ import annotations

from fractions import Fraction
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from headrace_schemas.values.base import (
    AliasName,
    Event,
    Finite,
    LongText,
    Model,
    ModelName,
    Share,
    Text,
    Timestamp,
    Version,
)
from headrace_schemas.values.blobs import BlobRef
from headrace_schemas.values.bounds import INT32
from headrace_schemas.values.ids import derived_id

Alias = Literal["champion", "canary", "previous"]


class ServedVersion(Model):
    """A version that replicas must load, with the reference to its manifest."""

    version: Version
    manifest: BlobRef


class Arm(Model):
    """A candidate that serves a share of a model's users or sessions (units) in a rollout."""

    rollout_id: Text
    version: Version
    slot: Annotated[int, Field(ge=0, le=7)]
    share: Share
    """The candidate's share of all units. Its control has an equal share."""


class TrafficSplit(Model):
    """Division of the units of a model by `headrace_schemas.rules.assignment`.

    It applies to calls that name the model or its champion, not to calls that name a version or evaluate.
    """

    unit: Literal["session", "user"]
    salt: Text
    slots: Annotated[int, Field(ge=1, le=8)]
    arms: tuple[Arm, ...] = Field(min_length=1, max_length=8)

    @model_validator(mode="after")
    def _arms_fit_beside_each_other(self) -> Self:
        most = Fraction(1, self.slots + 1)
        for arm in self.arms:
            if arm.slot >= self.slots or Fraction(arm.share) > most:
                raise ValueError(
                    f"arm {arm.version}: slot {arm.slot} and share {arm.share} do not fit {self.slots} slots; the "
                    f"share must be at most {most}"
                )
        slots, versions = {arm.slot for arm in self.arms}, {arm.version for arm in self.arms}
        if len(slots) < len(self.arms) or len(versions) < len(self.arms):
            raise ValueError("two arms have the same slot or the same version")
        return self


class Routing(Event):
    """The complete routing table of one model. The highest `revision` is valid. Only the registry produces it.

    Replicas load all versions in `serve` and may unload other versions once they are drained. A version in `withdrawn`
    gets no new turns, not even of sticky sessions.
    """

    topic: ClassVar[str] = "routing"
    type: ClassVar[str] = "headrace.routing.v1"

    model: ModelName
    revision: Annotated[int, Field(ge=0), INT32]
    aliases: dict[Alias, Version]
    serve: tuple[ServedVersion, ...] = Field(max_length=64)
    withdrawn: tuple[Version, ...] = Field(default=(), max_length=1024)
    names: dict[AliasName, Version] = Field(default_factory=dict, max_length=256)
    """Further names of served versions: aliases and labels."""
    untrained: tuple[Version, ...] = Field(default=(), max_length=1024)
    """The latest fixed versions. Their answers are captured but never trained."""
    pinned: Version | None = None
    """The one version that may be champion until an operator unpins it."""
    paused: bool = False
    """Whether new versions are only registered and wait. Requests of operators still take effect."""
    split: TrafficSplit | None = None
    """The candidates with their shares of the traffic, or None if the champion serves all traffic."""

    @property
    def champion(self) -> str | None:
        return self.aliases.get("champion")

    @property
    def event_id(self) -> str:
        return derived_id("routing", self.model, self.revision)

    @property
    def key(self) -> str:
        return self.model


class Probe(Model):
    """Comparison of the logprobs of a replica's loaded weights with the version's `Fingerprint` and its parent's."""

    max_abs_delta: Finite
    """Largest absolute difference between the logprobs of the engine and of the fingerprint."""
    parent_max_abs_delta: Finite | None = None
    passed: bool


LoadState = Literal["loading", "ready", "draining", "failed"]


class LoadedVersion(Model):
    """The state of one version on a replica."""

    version: Version
    state: LoadState
    error: LongText | None = None
    probe: Probe | None = None


PROMPT = "prompt"
"""Name of the ability `Replica.prompts` in `Replica.abilities`."""


class Replica(Event):
    """A heartbeat of one inference replica. Without a heartbeat for `ttl_s` the replica counts as dead."""

    topic: ClassVar[str] = "replicas"
    type: ClassVar[str] = "headrace.replica.v1"

    replica_id: Text
    url: Text
    engine: Text
    versions: tuple[LoadedVersion, ...] = Field(default=(), max_length=64)
    in_flight: Annotated[int, Field(ge=0), INT32] = 0
    capacity: Annotated[int, Field(ge=1), INT32]
    ttl_s: Annotated[Finite, Field(gt=0)]
    started_at: Timestamp
    stopping: bool = False
    resumes: bool = False
    """Whether it can continue an answer that another replica began (`headrace_resume`)."""
    histories: bool = False
    """Whether it continues the tokens of a call that another replica answered (`headrace_history`)."""
    scores: bool = False
    """Whether it serves logprobs of given answers (`headrace_schemas.http.replica_api`)."""
    grammars: tuple[Text, ...] = Field(default=(), max_length=16)
    """The request fields whose constraints it enforces: `response_format`, `tool_choice`."""
    prompts: bool = False
    """Whether it takes prompts that no chat template renders (`headrace_prompt`)."""
    signature: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")] = ""
    """HMAC-SHA256 over `replica_id` and `url` with the internal key of the services; empty without such a key."""

    @property
    def event_id(self) -> str:
        return derived_id("replica", self.replica_id, self.time.isoformat())

    @property
    def key(self) -> str:
        return self.replica_id

    @property
    def abilities(self) -> frozenset[str]:
        """The optional request fields (not every replica supports them) that this replica supports."""
        return frozenset((*self.grammars, *((PROMPT,) if self.prompts else ())))

    def ready(self, version: str) -> bool:
        """Return whether the replica accepts calls of `version`."""
        return self.state_of(version) == "ready"

    def state_of(self, version: str) -> LoadState | None:
        """Return the state of `version` on the replica, or None if it lacks the version or is stopping.

        A draining version finishes answers that this replica or another one began.
        """
        if self.stopping:
            return None
        return next((loaded.state for loaded in self.versions if loaded.version == version), None)
