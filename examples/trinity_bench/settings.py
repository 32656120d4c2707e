"""Settings of the gate, a TOML file, and Trinity's YAML configuration for one bench of one exact version."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from headrace_runtime.settings.table import parse_toml
from headrace_schemas.values.text import read_user_text

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
Text = Annotated[str, Field(min_length=1)]
Row = Mapping[str, Any]
_PROJECT, _TASKSET = "headrace", "plays"
_MARGIN_S = 30
"""Seconds that Trinity's own timeout is longer than a play's, so that the play itself reports its timeout."""


class Unusable(Exception):
    """Error of a setting or a task file that cannot be used. The message has the problem and the remedy."""


class Settings(BaseModel):
    """Settings of the gate. Paths are relative to the folder of the file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    python: Text
    """Python of Trinity's environment."""
    workflow: Text
    """Trinity's name of a workflow, or the dotted path of your class."""
    gate_tasks: Path
    """File of JSON lines with the Trinity tasks that decide about versions."""
    audit_tasks: Path
    """File of JSON lines with other tasks, which only measure."""
    name_key: str = ""
    """Key of a row that names its task; if empty, tasks are numbered."""
    reward: str = ""
    """Trinity's `default_reward_fn_type`, for workflows that take one."""
    metric: str = ""
    """Name of the metric that is the score of a run; if empty, the score is the reward."""
    lowest: Finite = 0.0
    highest: Finite = 1.0
    """Rewards from `lowest` to `highest` become scores from 0 to 1; a reward outside of them fails the bench."""
    format: Mapping[str, Any] = {}
    """The taskset's `format`, such as `prompt_key`. Trinity refuses unknown keys."""
    rollout: Mapping[str, Any] = {}
    """The taskset's `rollout_args`, such as `temperature` and `max_tokens`."""
    workflow_args: Mapping[str, Any] = {}
    reward_args: Mapping[str, Any] = {}
    max_model_len: Count = 4096
    max_response_tokens: Count = 1024
    runners: Count = 8
    """Concurrent plays of a bench; each is a process."""
    benches: Count = 1
    """Concurrent benches; there is one for each requested version."""
    play_timeout_s: Positive = 600.0
    start_timeout_s: Positive = 300.0
    """Time limit for the start of Ray, and for Trinity around the plays of a bench."""
    folder: Path | None = None
    """Folder of temporary files; by default the system's. Ray's sockets are in it, so that its path must be short."""

    @model_validator(mode="after")
    def _ordered(self) -> Settings:
        if self.lowest >= self.highest:
            raise ValueError("`lowest` must be less than `highest`")
        if self.max_response_tokens >= self.max_model_len:
            raise ValueError("`max_response_tokens` must be less than `max_model_len`, which includes the prompt")
        if {"n", "logprobs"} & set(self.rollout):
            raise ValueError("`rollout` must not have n or logprobs: a play is one run and is not trained")
        return self


def read(path: Path, python: str | None = None) -> Settings:
    """Read the settings. `python` overrides that of the file. Raises `Unusable`."""
    try:
        table = parse_toml(path.read_bytes())
        settings = Settings.model_validate({**table, **({"python": python} if python else {})})
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
    """Return rows by task name, from `name_key` or numbered with `prefix`. Raises `Unusable`."""
    rows_by_name: dict[str, Row] = {}
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
            raise Unusable(f"{path}, line {number}: must be a JSON object")
        name = str(row.get(name_key, "")) if name_key else f"{prefix}-{number}"
        if not name:
            raise Unusable(f"{path}, line {number}: has no {name_key!r}, the key of task names (`name_key`)")
        if name in rows_by_name:
            raise Unusable(f"{path}, line {number}: duplicates the task {name!r}")
        rows_by_name[name] = row
    return rows_by_name


@dataclass(frozen=True, slots=True)
class Job:
    """Names and files of one bench, which has a `folder` of its own."""

    folder: Path
    version: str
    ray_address: str
    plays: int

    @property
    def yaml(self) -> Path:
        return self.folder / "bench.yaml"

    @property
    def tasks(self) -> Path:
        """Folder with one file of task rows."""
        return self.folder / "tasks"

    @property
    def results(self) -> Path:
        return self.folder / "results.jsonl"

    @property
    def log(self) -> Path:
        return self.folder / "trinity.log"


def plays_timeout_s(settings: Settings, job: Job) -> float:
    """Return the time limit of all plays of a bench, which run in rounds."""
    return settings.play_timeout_s * math.ceil(job.plays / settings.runners)


def configuration(settings: Settings, job: Job) -> Mapping[str, Any]:
    """Return the YAML configuration of a bench as a mapping.

    It contains no secrets and no names of variables with secrets, because Ray shows the values of variables that it
    names.
    """
    bench_arguments = {
        "workflow": settings.workflow,
        "metric": settings.metric,
        "timeout_s": settings.play_timeout_s,
        "results": str(job.results),
    }
    taskset: dict[str, Any] = {
        "name": _TASKSET,
        "storage_type": "file",
        "path": str(job.tasks),
        "split": "train",  # split name of a single file of rows
        "repeat_times": 1,
        "default_workflow_type": "trinity_bench.inside.played.Played",
        "workflow_args": {**settings.workflow_args, "headrace_bench": bench_arguments},
        "reward_fn_args": dict(settings.reward_args),
        "rollout_args": dict(settings.rollout),
        "format": dict(settings.format),
    }
    if settings.reward:
        taskset["default_reward_fn_type"] = settings.reward
    return {
        "mode": "bench",
        "project": _PROJECT,
        "name": job.folder.name,
        "ray_namespace": f"{_PROJECT}/{job.folder.name}",
        "checkpoint_root_dir": str(job.folder / "job"),
        "model": {
            "model_path": job.version,  # the model name that workflows send
            "max_model_len": settings.max_model_len,
            "max_response_tokens": settings.max_response_tokens,
            "temperature": settings.rollout.get("temperature", 1.0),
            "external_model": {
                "enable": True,
                "model_name": job.version,
                "base_url_env": "HEADRACE_BENCH_URL",
                "api_key_env": "HEADRACE_BENCH_NO_KEY",
            },
        },
        "cluster": {
            "ray_address": job.ray_address,
            "node_num": 1,
            "gpu_per_node": 1,
        },  # Trinity queries the cluster if they are missing
        "buffer": {"batch_size": settings.runners, "explorer_input": {"eval_tasksets": [taskset]}},
        "explorer": {
            "runner_per_model": settings.runners,
            "max_timeout": math.ceil(plays_timeout_s(settings, job)) + _MARGIN_S,  # limit of one play, and of all plays
            "max_retry_times": 0,  # a retry would be another play
            "eval_on_startup": True,
            "rollout_model": {"engine_type": "external", "enable_openai_api": True, "enable_history": True},
        },
        "monitor": {"monitor_type": "trinity_bench.inside.played.Monitor"},
        "synchronizer": {"sync_method": "checkpoint"},
    }


def as_yaml(table: Mapping[str, Any]) -> str:
    """Return a configuration as JSON, which is also YAML."""
    return json.dumps(table, indent=2) + "\n"
