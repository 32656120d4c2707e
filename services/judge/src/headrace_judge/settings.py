"""The section `[judge]`. An endpoint and a model are required; without them the judge does not start."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, JsonValue, SecretStr, ValidationInfo, field_validator

from headrace_judge import INFO
from headrace_judge.rubric import RUBRICS
from headrace_runtime.registries import OrNameIn
from headrace_runtime.settings.sections import Port, Section, ServiceSettings
from headrace_runtime.settings.table import Fixed

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
    """Endpoint and model of the judge."""

    COMMON: ClassVar = ("base_url", "model", "api_key_env")
    FIXED: ClassVar = {
        "json_mode": Fixed(False, 'set judge.endpoint.extra = {response_format = {type = "json_object"}}')
    }

    base_url: Annotated[str, AfterValidator(_address)] = Field(default="", validate_default=True)
    """Root of an OpenAI-compatible API, up to and including its `/v1`."""
    model: Annotated[str, AfterValidator(_model)] = Field(default="", validate_default=True, max_length=256)
    """Name of the model at the endpoint. Use a pinned version, because verdicts of different models cannot be
    compared."""
    api_key: SecretStr = SecretStr("")
    """Bearer token. It is safer in the environment: see `api_key_env`."""
    api_key_env: str = ""
    """Name of the environment variable with the bearer token, instead of `api_key`."""
    is_gateway: bool = False
    """Whether the endpoint is a Headrace gateway. Calls then have the header `X-Headrace-Purpose: eval`, so that the
    judge's own calls are neither trained nor judged."""
    concurrency: Count = 8
    """Trajectories or pairs that are judged at a time."""
    timeout_s: Positive = 60.0
    """Seconds that one call may take in total."""
    max_tokens: Count = 1024
    """Largest number of tokens of a verdict. A model that writes its reasoning needs more."""
    temperature: Annotated[float, Field(ge=0, le=2)] = 0.0
    """Sampling temperature. 0 makes verdicts repeatable; `samples` above 1 require a higher one."""
    extra: dict[str, JsonValue] = Field(default_factory=dict)
    """Further fields of the request, such as `reasoning_effort`, `max_completion_tokens` or `response_format`."""
    omit: tuple[Literal["temperature", "max_tokens"], ...] = ()
    """Fields that are not sent, because the endpoint does not accept them."""

    @field_validator("extra")
    @classmethod
    def _check_extra(cls, extra: dict[str, JsonValue]) -> dict[str, JsonValue]:
        reserved = sorted({"model", "messages", "stream", "n", "temperature", "max_tokens"} & set(extra))
        if reserved:
            raise ValueError(f"{', '.join(reserved)} cannot be set here")
        return extra

    @field_validator("api_key_env")
    @classmethod
    def _check_one_key(cls, name: str, info: ValidationInfo) -> str:
        if name and info.data.get("api_key"):
            raise ValueError("api_key is set as well; keep one of them")
        return name


class RetrySettings(Section):
    """Retries of failed calls to the endpoint. They survive a restart."""

    PARAMETERS: ClassVar = ("attempts_max", "timeouts_max")

    attempts_max: Count = 20
    """Number of attempts for a trajectory or pair before its outcome is `failed`. They take about 75 minutes, so an
    endpoint may be unavailable for an hour. An attempt that a crash ended counts as well."""
    timeouts_max: Count = 2
    """Number of calls that may time out before the outcome is `timed_out`: each may have been billed, so the limit is
    low."""


class BudgetSettings(Section):
    """Limits of calls and tokens. They are counted in the database, for all replicas together. Unset: no limit.

    Hours and days are those of UTC. When a limit is reached, the judge abstains, and the reason names the limit. A call
    is counted before it is made with an estimate of its tokens, which is corrected afterwards. So a limit is exceeded
    by at most the error of the estimates of calls in progress. Tenants that were judged in a period or the one before
    share its limit.
    """

    COMMON: ClassVar = ("calls_per_day",)
    TIER: ClassVar[Literal["tuning", "limits"]] = "limits"

    calls_per_hour: Limit = None
    """Calls to the endpoint, retries included."""
    calls_per_day: Limit = None
    """Calls to the endpoint per day, retries included."""
    tokens_per_hour: Limit = None
    """Prompt and completion tokens, as the endpoint reports them, or else estimated."""
    tokens_per_day: Limit = None
    """Prompt and completion tokens per day."""


class PairSettings(Section):
    """Pairing of runs of one task, for rubrics of mode `pair`."""

    PARAMETERS: ClassVar = ("window_s",)

    wait_s: Positive = 600.0
    """Seconds that a run waits for another run of its task before it gets an abstention. A later run revises it."""
    window_s: Positive = 14_400.0
    """Seconds for which a run can be compared with later runs. Four hours cover a working session, and bound the runs
    that the database keeps."""

    @property
    def comparable_s(self) -> float:
        """Seconds for which a run can be compared: at least as long as it waits for another one."""
        return max(self.window_s, self.wait_s)


class JudgeSettings(ServiceSettings):
    """The section `[judge]`."""

    COMMON: ClassVar = ("rubrics", "sample_rate")
    SHARED: ClassVar = ("host", "lease_s", "retry_s")

    port: Port = INFO.port
    """Port of `/health` and `/metrics`; 0 lets the system choose."""
    endpoint: EndpointSettings = Field(default={}, validate_default=True)
    retry: RetrySettings = RetrySettings()
    budget: BudgetSettings = BudgetSettings()
    pairs: PairSettings = PairSettings()
    rubrics: Annotated[tuple[Rubric, ...], Field(min_length=1, max_length=16)] = ("helpfulness",)
    """Names of announced rubrics, or paths of rubric files (TOML). Each is a separate source of rewards."""
    templates_dir: Path | None = None
    """Folder whose prompt templates replace the shipped ones of the same name."""
    sample_rate: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Share of training trajectories that are judged, selected by a digest of their id. The others get an
    abstention."""
    judge_eval: bool = False
    """Whether to judge all evaluation trajectories, too. Otherwise they get no reward."""
    samples: Annotated[int, Field(ge=1, le=15)] = 1
    """Number of verdicts per question. Their median counts."""
    lease_s: Annotated[float, Field(ge=1)] = 30.0
    """Seconds after the end of a judge until another one takes over its jobs."""
    retry_s: Positive = 60.0
    """Seconds that the bus or the database may be unavailable before the process ends and is restarted."""

    @field_validator("samples")
    @classmethod
    def _check_samples(cls, samples: int, info: ValidationInfo) -> int:
        endpoint = info.data.get("endpoint")
        fixed = endpoint is not None and endpoint.temperature == 0 and "temperature" not in endpoint.omit
        if samples > 1 and fixed:
            raise ValueError(
                "at endpoint.temperature 0 all samples are equal; raise the temperature, or set samples to 1"
            )
        return samples
