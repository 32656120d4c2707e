"""The section `[judge]`. Without an endpoint and a model there is nothing to start, and the refusal says so."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, JsonValue, SecretStr, ValidationInfo, field_validator

from headrace_judge.rubric import RUBRICS
from headrace_judge.service import INFO
from headrace_runtime.registries import OrNameIn
from headrace_runtime.settings import Port, Section, ServiceSettings

Rubric = Annotated[str, OrNameIn(RUBRICS)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
Limit = Annotated[int, Field(ge=0)] | None


def _address(text: str) -> str:
    if not text:
        raise ValueError(
            "the judge has no endpoint; set judge.endpoint.base_url to an OpenAI-compatible one, such as "
            "http://127.0.0.1:8000/v1, or do not start the judge"
        )
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("must be an http:// or https:// address")
    return text.rstrip("/")


def _model(text: str) -> str:
    if not text:
        raise ValueError("the judge has no model; set judge.endpoint.model to a name that the endpoint knows")
    return text


class EndpointSettings(Section):
    """The model that judges."""

    COMMON: ClassVar = ("base_url", "model", "api_key_env")

    base_url: Annotated[str, AfterValidator(_address)] = Field(default="", validate_default=True)
    """Root of an OpenAI-compatible API, up to and including its `/v1`."""
    model: Annotated[str, AfterValidator(_model)] = Field(default="", validate_default=True, max_length=256)
    """Name of the model there. A pinned version is best: the verdicts of two models are not comparable."""
    api_key: SecretStr = SecretStr("")
    """Bearer token. Better kept in the environment: see `api_key_env`."""
    api_key_env: str = ""
    """Name of the environment variable that holds the bearer token, instead of `api_key`."""
    is_gateway: bool = False
    """Whether the endpoint is a Headrace gateway. Calls then carry `X-Headrace-Purpose: eval`, so that the
    judge's own calls are neither trained nor judged."""
    concurrency: Count = 8
    """Trajectories, or pairs, that are being judged at one time."""
    timeout_s: Positive = 60.0
    """How long one call may take, whole."""
    max_tokens: Count = 1024
    """Longest verdict; a model that reasons aloud needs more."""
    temperature: Annotated[float, Field(ge=0, le=2)] = 0.0
    """Sampling temperature. 0 makes verdicts repeatable; `samples` above 1 wants more."""
    json_mode: bool = False
    """Ask for `response_format: json_object`. Not every endpoint knows it; verdicts are checked either way."""
    extra: dict[str, JsonValue] = Field(default_factory=dict)
    """Further fields of the request, such as `reasoning_effort` or `max_completion_tokens`."""
    omit: tuple[Literal["temperature", "max_tokens"], ...] = ()
    """Fields that the endpoint does not take; they are not sent."""
    response_bytes_max: Annotated[int, Field(ge=1024)] = 1_048_576
    """Longer responses are not read."""

    @field_validator("extra")
    @classmethod
    def _leaves_the_question_alone(cls, extra: dict[str, JsonValue]) -> dict[str, JsonValue]:
        ours = sorted({"model", "messages", "stream", "n", "temperature", "max_tokens"} & set(extra))
        if ours:
            raise ValueError(f"{', '.join(ours)} cannot be set here")
        return extra

    @field_validator("api_key_env")
    @classmethod
    def _one_key(cls, name: str, info: ValidationInfo) -> str:
        if name and info.data.get("api_key"):
            raise ValueError("api_key is set as well; keep one of them")
        return name


class RetrySettings(Section):
    """What happens when the endpoint does not answer as it should. Retries survive a restart."""

    TIER: ClassVar[Literal["tuning", "limits"]] = "limits"

    attempts_max: Count = 20
    """How often a trajectory or pair is tried before its outcome is `failed`. With the other defaults it is given up
    after some 75 minutes, so an endpoint may be away for an hour. A try that a crash ended counts as well."""
    backoff_s: Positive = 1.0
    """Wait after the first failure; it grows fourfold each time."""
    backoff_max_s: Positive = 300.0
    """Longest wait that we choose ourselves."""
    retry_after_max_s: Positive = 3600.0
    """Longest wait that the endpoint may ask for by `Retry-After`."""
    timeouts_max: Count = 2
    """How often a call that timed out is made before the outcome is `timed_out`. Each may have been billed."""


class BudgetSettings(Section):
    """What may be spent, counted in the database, so over restarts and over all replicas. Unset: no limit.

    Hours and days are those of UTC. When a limit is reached the judge abstains and says which. A call is counted
    before it is made with an estimate of its tokens, and corrected afterwards, so a limit is overrun by no more than
    what calls in progress were underestimated. Tenants that were judged in a period or the one before share its limit.
    """

    COMMON: ClassVar = ("calls_per_day",)
    TIER: ClassVar[Literal["tuning", "limits"]] = "limits"

    calls_per_hour: Limit = None
    """Calls to the endpoint, retries included."""
    calls_per_day: Limit = None
    """Calls to the endpoint per day, retries included."""
    tokens_per_hour: Limit = None
    """Prompt and completion tokens as the endpoint reports them (estimated where it does not)."""
    tokens_per_day: Limit = None
    """As above, per day."""


class PairSettings(Section):
    """How rubrics of mode `pair` bring runs of one task together."""

    wait_s: Positive = 600.0
    """How long a run waits for another of its task before it abstains. One that comes later still revises that."""
    window_s: Positive = 14_400.0
    """How long a run stays to be compared with those that come later."""
    pairs_per_task_max: Count = 28
    """Pairs that are judged per task within one window; 28 are all pairs of 8 runs. Two calls each."""

    @field_validator("window_s")
    @classmethod
    def _stays_while_it_waits(cls, window_s: float, info: ValidationInfo) -> float:
        if window_s < info.data.get("wait_s", 0):
            raise ValueError("is shorter than wait_s")
        return window_s


class JudgeSettings(ServiceSettings):
    """All of `[judge]`."""

    COMMON: ClassVar = ("rubrics", "sample_rate")

    port: Port = INFO.port
    """Port of `/health` and `/metrics`; 0 lets the system choose."""
    endpoint: EndpointSettings = Field(default={}, validate_default=True)
    retry: RetrySettings = RetrySettings()
    budget: BudgetSettings = BudgetSettings()
    pairs: PairSettings = PairSettings()
    rubrics: Annotated[tuple[Rubric, ...], Field(min_length=1, max_length=16)] = ("helpfulness",)
    """Names of rubrics that are announced, or paths of rubric files (TOML); each is a source of rewards of its own."""
    templates_dir: Path | None = None
    """Folder whose prompt templates replace the shipped ones of the same name."""
    sample_rate: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Share of training trajectories that are judged, chosen by a digest of their id; others get an abstention."""
    judge_eval: bool = False
    """Also judge evaluation trajectories, all of them. Otherwise they get no reward."""
    samples: Annotated[int, Field(ge=1, le=15)] = 1
    """Verdicts per question; their median counts."""
    queue_max: Count = 50_000
    """Trajectories and pairs that may wait in the database. Beyond it the judge abstains, rather than fall behind."""
    lease_s: Annotated[float, Field(ge=1)] = 30.0
    """How soon another judge takes over the jobs of one that died."""
    cache_days: Positive = 30.0
    """How long verdicts are kept to be used again for the same question."""
    retry_s: Positive = 60.0
    """How long bus or database may be away before the process gives up and is restarted."""

    @field_validator("samples")
    @classmethod
    def _samples_differ(cls, samples: int, info: ValidationInfo) -> int:
        endpoint = info.data.get("endpoint")
        fixed = endpoint is not None and endpoint.temperature == 0 and "temperature" not in endpoint.omit
        if samples > 1 and fixed:
            raise ValueError(
                "at endpoint.temperature 0 all samples are one verdict; raise the temperature or ask for 1"
            )
        return samples
