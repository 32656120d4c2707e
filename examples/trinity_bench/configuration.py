"""Trinity's YAML configuration for one bench of one exact version."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trinity_bench.settings import Settings

_PROJECT, _TASKSET = "headrace", "plays"
_MARGIN_S = 30
"""Seconds that Trinity's own timeout is longer than a play's, so that the play itself reports its timeout."""


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
        "monitor": {"monitor_type": "trinity_bench.inside.external_model.Monitor"},
        "synchronizer": {"sync_method": "checkpoint"},
    }


def as_yaml(table: Mapping[str, Any]) -> str:
    """Return a configuration as JSON, which is also YAML."""
    return json.dumps(table, indent=2) + "\n"
