"""Settings of the gateway: the section `[gateway]`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from headrace_gateway import INFO
from headrace_runtime.settings.sections import Port, Section, ServiceSettings, is_loopback
from headrace_runtime.settings.table import Fixed
from headrace_schemas.values.base import ModelName
from headrace_schemas.values.ids import NAME

Scope = Literal["chat", "feedback", "admin"]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Label = Annotated[str, Field(min_length=1, max_length=128, pattern=NAME)]


@dataclass(frozen=True, slots=True)
class RequestRules:
    """Limits and settings that decide whether a request is accepted."""

    choices_max: int = 16
    """Largest accepted `n` of a request."""
    json_values_max: int = 32_768
    """Maximum number of values in the JSON of a request body, estimated from its commas and brackets outside of
    strings."""
    strict: bool = False
    """Whether requests with ignored fields are refused."""
    media: Literal["refuse", "placeholder"] = "refuse"
    """Treatment of images, audio and files in messages."""


class LimitSettings(Section):
    """Limits of one caller, or of all callers together. Beyond them the answer is 429 (413 for the body)."""

    TIER: ClassVar[Literal["tuning", "limits"]] = "limits"

    requests_per_s: Positive = 500.0
    """Requests per second in the long run. Each of the `n` choices of a call counts as a request."""
    burst: Annotated[int, Field(ge=1)] = 1000
    """Requests that may come at once after a pause."""
    concurrency: Annotated[int, Field(ge=1)] = 1024
    """Requests in progress at one time, choices and those that wait for a replica included."""
    tokens_per_s: Positive = 500_000.0
    """Tokens of prompts and of all choices per second in the long run. A call is charged its largest possible use
    (its size and its `max_tokens`) when it begins, and gets the unused part back when it ends."""
    tokens_burst: Annotated[int, Field(ge=1)] = 50_000_000
    """Tokens that calls may be charged at once after a pause."""
    body_bytes_max: Annotated[int, Field(ge=1024)] = 8_388_608
    """Largest request body."""


class TotalLimitSettings(LimitSettings):
    """Limits of all callers together. The size of a body is limited for each key."""

    FIXED: ClassVar = {"body_bytes_max": Fixed(8_388_608, "set gateway.limits_per_key.body_bytes_max")}
    PARAMETERS: ClassVar = ("body_bytes_max",)


class KeySettings(Section):
    """One API key. Only its digest is kept: `printf %s "$KEY" | sha256sum`."""

    name: Label
    """For logs and metrics; never the key itself."""
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    """SHA-256 of the key in hexadecimal."""
    tenant: Label = "default"
    """The tenant that this key reads and writes; tenants never share a session."""
    scopes: tuple[Scope, ...] = ("chat", "feedback")
    """`chat` calls models, `feedback` judges and ends sessions, `admin` also ingests trajectories."""
    models: tuple[ModelName, ...] = ()
    """Models that this key may list, call and send trajectories of; for it there are no others. Empty: all."""
    session_id: Annotated[str, Field(pattern=f"^$|{NAME}")] = ""
    """Binds the key to one session, and a request that names another one is refused with 403; empty: calls name or
    imply their session."""
    limits: LimitSettings | None = None
    """Limits of this key in place of `gateway.limits_per_key`."""


class CaptureSettings(Section):
    """How a turn is stored on the bus, or on the gateway's disk while the bus is away, before its client sees the end
    of the response.
    """

    FIXED: ClassVar = {"spool_tenant_share": Fixed(0.5)}
    PARAMETERS: ClassVar = ("bus_wait_s",)

    bus_wait_s: Positive = 2.0
    """How long the bus may take to acknowledge before the event goes to the spool instead: longer than an ordinary
    pause of a broker, and short enough for a client that waits for the end of its answer."""
    spool_dir: str = ""
    """Folder of the spool, one gateway process each; empty for `gateway/spool` under `data_dir`."""
    spool_bytes_max: Annotated[int, Field(ge=1024)] = 1_073_741_824
    """At this size, with the bus still away, new requests are refused with 503 rather than a turn lost."""
    spool_reserve_bytes: Annotated[int, Field(ge=131_072)] = 16_777_216
    """Room on the disk that the spool holds ahead, for the turns of calls that are under way when the disk fills up.
    While it cannot be had and the bus is away, new requests are refused with 503."""
    tenant_bytes_per_hour: Annotated[int, Field(ge=1_048_576)] = 34_359_738_368
    """About how many bytes of events one tenant may have stored per hour; beyond it new requests of that tenant are
    refused with 429. A turn is always kept."""
    references_bytes_max: Annotated[int, Field(ge=0)] = 67_108_864
    """Most bytes of the last turns of each session that this process remembers, so that a turn that continues one of
    them contains the rest only (`extends`), and a replica that did not answer them, or was restarted, continues
    their exact tokens. The tenant with most bytes forgets its least recently used session first, and the next turn of
    that session is whole. 0: every turn is whole, for readers of `turns` that do not resolve references."""


class UpstreamSettings(Section):
    """How replicas are called, and how long failures of replicas are hidden from clients."""

    PARAMETERS: ClassVar = ("probe_timeout_s", "stall_timeout_s")

    hold_s: Positive = 60.0
    """How long a request waits for a replica that can serve it, retries included, before it fails."""
    routing_wait_s: Positive = 10.0
    """How long a request waits for the first routing table after the start."""
    request_timeout_s: Positive = 600.0
    """How long one request may take altogether."""
    probe_timeout_s: Positive = 2.0
    """How long a check of a silent replica's health may take. After two failed checks the replica hangs, and its calls
    move to another one. A replica's event loop answers at once, whatever its engine computes."""
    stall_timeout_s: Positive = 60.0
    """How long a replica that has begun to answer may be silent before its work is moved to another: many times the
    step of a large model on a CPU."""


class StickySettings(Section):
    """A session keeps its version until it is idle or the version is withdrawn."""

    idle_s: Positive = 300.0
    """A session without a call for this long gets the current version at its next one."""


class GatewaySettings(ServiceSettings):
    """Settings of the gateway."""

    COMMON: ClassVar = ("port", "keys", "model_aliases")

    port: Port = INFO.port
    trinity_port: Port = 0
    """A second port with the same pages, for clients of Trinity-RFT, which expect 8010 (give `inference.port` another
    one then); 0: none. Unlike `port` it is not held while the gateway is started again."""
    keys: tuple[KeySettings, ...] = ()
    """API keys. Without any, everything is open, tenant `default`, and only loopback may be listened on."""
    keys_file: str = ""
    """A TOML file with more `[[keys]]`, so that keys can be kept apart from the other settings."""
    limits_total: TotalLimitSettings = TotalLimitSettings(
        requests_per_s=2000.0, burst=4000, concurrency=4096, tokens_per_s=2_000_000.0, tokens_burst=200_000_000
    )
    """Limits of all callers together. A call takes two file descriptors: fewer mean less concurrency."""
    limits_per_key: LimitSettings = LimitSettings()
    """Limits of each key."""
    tenant_share: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Where keys belong to several tenants, the part of `limits_total` that one of them alone may use."""
    model_aliases: dict[str, str] = Field(default={})
    """Names that clients use, with the names of your models, e.g. `"gpt-4o" = "email-agent"` or `"old" =
    "email-agent:previous"`. The name `"*"` stands for all that are not known."""
    any_model_name: Literal["auto", "always", "never"] = "auto"
    """When the only model, while there is one, answers to all names that are not known; the response header
    `x-headrace-ignored` then names `model`. `auto`: where the gateway listens on this machine alone, has no keys and is
    not `strict`."""
    strict: bool = False
    """Refuse hints that have no effect here (`service_tier`, `verbosity`, ...) with 400. Otherwise they are
    accepted, and the response header `x-headrace-ignored` names them. Fields that change the meaning of a call
    are always refused."""
    media: Literal["refuse", "placeholder"] = "refuse"
    """Images, audio and files in messages: refused with 400, or replaced by a text such as `[image omitted: this model
    reads text only]`, so that one screenshot does not end an agent's run."""
    responses_bytes_max: Annotated[int, Field(ge=0)] = 134_217_728
    """Most bytes of requests and responses of `POST /v1/responses` that this process stores in memory for
    `previous_response_id`, `item_reference` and `GET`; those unused for longest are dropped first. 0: none."""
    side_calls: dict[Label, Annotated[str, Field(min_length=1, max_length=1024)]] = Field(default={})
    """Kinds of calls that your agent makes beside its task, each with a text that the first or the last message of such
    a call contains, e.g. `title = "Write a title for this conversation"`. Side calls are captured and do not get the
    reward of the run (`collector.side_calls`)."""
    capture: CaptureSettings = CaptureSettings()
    upstream: UpstreamSettings = UpstreamSettings()
    sticky: StickySettings = StickySettings()

    @property
    def answers_to_any_name(self) -> bool:
        """Whether unknown model names refer to the only model while there is a single one."""
        if self.any_model_name == "auto":
            return is_loopback(self.host) and not (self.keys or self.keys_file or self.strict)
        return self.any_model_name == "always"

    @property
    def request_rules(self) -> RequestRules:
        """Settings that decide whether a request is accepted."""
        return RequestRules(strict=self.strict, media=self.media)
