"""What a gate of Trinity's benches is told: a TOML file, whose unknown keys are refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from headrace_runtime.settings_table import parse_toml
from headrace_schemas.user_text import read_user_text

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
Text = Annotated[str, Field(min_length=1)]
Row = Mapping[str, Any]


class Unusable(Exception):
    """A setting or a file of tasks that no bench can be made of: what it is, and what would do."""


class Settings(BaseModel):
    """Paths are looked up from the folder of the file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    python: Text
    """Of Trinity's environment."""
    workflow: Text
    """Trinity's name of a workflow, or the dotted path of your class."""
    gate_tasks: Path
    """JSON lines, as a taskset of Trinity's has them: the tasks that decide."""
    audit_tasks: Path
    """Other ones, which only measure."""
    name_key: str = ""
    """The key of a row that names its task; empty: they are numbered."""
    reward: str = ""
    """`default_reward_fn_type`, for workflows that take one."""
    metric: str = ""
    """The metric of a run that is its score; empty: its reward."""
    lowest: Finite = 0.0
    highest: Finite = 1.0
    """Rewards from `lowest` to `highest` become scores from 0 to 1; one beyond them fails the bench."""
    format: Mapping[str, Any] = {}
    """The taskset's `format`, such as `prompt_key`. Trinity refuses keys that it does not know."""
    rollout: Mapping[str, Any] = {}
    """The taskset's `rollout_args`, such as `temperature` and `max_tokens`."""
    workflow_args: Mapping[str, Any] = {}
    reward_args: Mapping[str, Any] = {}
    max_model_len: Count = 4096
    max_response_tokens: Count = 1024
    runners: Count = 8
    """Plays of a bench that run at a time; each is a process."""
    benches: Count = 1
    """Benches at a time: there is one for each version that is asked for."""
    play_timeout_s: Positive = 600.0
    start_timeout_s: Positive = 300.0
    """How long Ray may take to start, and Trinity around the plays of a bench."""
    folder: Path | None = None
    """Where benches have their temporary files; none: the system's. Ray's sockets lie in it, so its name is short."""

    @model_validator(mode="after")
    def _ordered(self) -> Settings:
        if self.lowest >= self.highest:
            raise ValueError("`lowest` has to be less than `highest`")
        if self.max_response_tokens >= self.max_model_len:
            raise ValueError("`max_response_tokens` has to be less than `max_model_len`, which has room for the prompt")
        if {"n", "logprobs"} & set(self.rollout):
            raise ValueError("`rollout` has n or logprobs: a play is one run, and nothing is trained of it")
        return self


def read(path: Path, python: str | None = None) -> Settings:
    """`python` takes the place of the file's. Raises `Unusable`."""
    try:
        given = parse_toml(path.read_bytes())
        settings = Settings.model_validate({**given, **({"python": python} if python else {})})
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        raise Unusable(f"{path}: {'.'.join(map(str, first['loc'])) or 'settings'}: {first['msg']}") from None
    except OSError as error:
        raise Unusable(f"{path}: {error}") from None
    except ValueError as error:
        raise Unusable(f"{path} {error}") from None
    files = {name: path.parent / getattr(settings, name) for name in ("gate_tasks", "audit_tasks")}
    return settings.model_copy(update=files)


def rows(path: Path, name_key: str, prefix: str) -> dict[str, Row]:
    """Rows by the names of their tasks: of `name_key`, or numbered behind `prefix`. Raises `Unusable`."""
    found: dict[str, Row] = {}
    try:
        lines = read_user_text(path).split("\n")
    except OSError as error:
        raise Unusable(f"{path}: {error}") from None
    except ValueError as error:
        raise Unusable(f"{path} {error}") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise Unusable(f"{path}, line {number}: {error}") from None
        if not isinstance(row, dict):
            raise Unusable(f"{path}, line {number}: is no JSON object")
        name = str(row.get(name_key, "")) if name_key else f"{prefix}-{number}"
        if not name:
            raise Unusable(f"{path}, line {number}: has no {name_key!r}, which `name_key` says names the task")
        if name in found:
            raise Unusable(f"{path}, line {number}: the task {name!r} is there twice")
        found[name] = row
    return found
