"""`routing` and `replicas` (both compacted): which version serves, and who can serve it."""

from __future__ import annotations

from fractions import Fraction
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from headrace_schemas.base import (
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
from headrace_schemas.blobs import BlobRef
from headrace_schemas.bounds import INT32
from headrace_schemas.ids import derived_id

Alias = Literal["champion", "canary", "previous"]


class ServedVersion(Model):
    """A version that replicas shall hold ready, and where its manifest lies."""

    version: Version
    manifest: BlobRef


class Arm(Model):
    """A candidate on live traffic: its rollout, its block of the units, and how much of all units it gets."""

    rollout_id: Text
    version: Version
    slot: Annotated[int, Field(ge=0, le=7)]
    share: Share
    """The champion's control is as large."""


class TrafficSplit(Model):
    """How gateways divide the units of a model, by the rule of `headrace_schemas.assignment`. It holds for calls that
    name the model or its champion; who names a version, or evaluates, is no part of it.
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
                raise ValueError(f"arm {arm.version}: slot {arm.slot}, share {arm.share} of {self.slots} slots")
        if len({arm.slot for arm in self.arms}) < len(self.arms) or len({one.version for one in self.arms}) < len(
            self.arms
        ):
            raise ValueError("two arms have one slot or one version")
        return self


class Routing(Event):
    """The whole routing table of one model; the highest `revision` is valid. Produced by the registry alone.

    Replicas load every version in `serve` and may unload others once drained. A version in `withdrawn` gets no new
    turn, sticky session or not.
    """

    topic: ClassVar[str] = "routing"
    type: ClassVar[str] = "headrace.routing.v1"

    model: ModelName
    revision: Annotated[int, Field(ge=0), INT32]
    aliases: dict[Alias, Version]
    serve: tuple[ServedVersion, ...] = Field(max_length=64)
    withdrawn: tuple[Version, ...] = Field(default=(), max_length=1024)
    names: dict[AliasName, Version] = Field(default_factory=dict, max_length=256)
    """Further names of served versions: the aliases that operators set, and the versions' own labels."""
    untrained: tuple[Version, ...] = Field(default=(), max_length=1024)
    """Versions that nobody trains here, the last ones: what they answer is captured and never trained."""
    pinned: Version | None = None
    """The one version that may be champion until an operator unpins it."""
    paused: bool = False
    """New versions are registered and wait. Requests of operators still take effect."""
    split: TrafficSplit | None = None
    """Who is on the way to champion, and with how much of the traffic. None: the champion serves everybody."""

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
    """Whether loaded weights answer as their fingerprint says, and differently from their parent's."""

    max_abs_delta: Finite
    """Largest absolute difference between the engine's logprobs and the fingerprint's."""
    parent_max_abs_delta: Finite | None = None
    passed: bool


LoadState = Literal["loading", "ready", "draining", "failed"]


class LoadedVersion(Model):
    """The state of one version on a replica."""

    version: Version
    state: LoadState
    error: LongText | None = None
    probe: Probe | None = None


class Replica(Event):
    """A heartbeat of one inference replica. Silence longer than `ttl_s` means that it is gone."""

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
    """It can continue an answer that another replica began (`headrace_resume`)."""
    scores: bool = False
    """It says the logprobs of given answers (`headrace_schemas.scoring`)."""
    grammars: tuple[Text, ...] = Field(default=(), max_length=16)
    """The fields of a request by which it holds an answer: `response_format`, `tool_choice`."""
    signature: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")] = ""
    """HMAC-SHA256 over `replica_id` and `url` with the key that services share; empty where they share none."""

    @property
    def event_id(self) -> str:
        return derived_id("replica", self.replica_id, self.time.isoformat())

    @property
    def key(self) -> str:
        return self.replica_id

    def ready(self, version: str) -> bool:
        return self.state_of(version) == "ready"

    def state_of(self, version: str) -> LoadState | None:
        """None when it does not have the version, or takes no calls. One that drains finishes what was begun, here or
        elsewhere."""
        return None if self.stopping else next((one.state for one in self.versions if one.version == version), None)
