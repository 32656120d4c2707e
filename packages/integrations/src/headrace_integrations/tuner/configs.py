"""Configuration objects of the tuner. AgentScope's own objects work as well, because only attributes are read."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace_integrations.practice.data_sets import rows_of


@dataclass(frozen=True, kw_only=True)
class TunerModelConfig:
    """The model to train. The workflow calls it with `temperature`, `top_p` and `max_tokens`."""

    model_path: str
    max_model_len: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int = 8192
    enable_thinking: bool | None = None
    tensor_parallel_size: int = 1
    inference_engine_num: int = 1
    tool_call_parser: str = "hermes"
    reasoning_parser: str = "deepseek_r1"
    tinker_config: Any = None


@dataclass(frozen=True, kw_only=True)
class TinkerConfig:
    """Configuration of the training service Tinker, which Headrace refuses."""

    rank: int = 16
    seed: int | None = None
    train_mlp: bool = True
    train_attn: bool = True
    train_unembed: bool = True
    base_url: str | None = None


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    """Algorithm of training. A step has `group_size` runs of each of `batch_size` tasks."""

    algorithm_type: str = "multi_step_grpo"
    learning_rate: float = 1e-6
    group_size: int = 8
    batch_size: int = 32
    save_interval_steps: int = 100
    eval_interval_steps: int = 100


@dataclass(frozen=True, kw_only=True)
class DatasetConfig:
    """A data set: a folder with `<split>.jsonl`, a file of rows, or a name that the package datasets loads."""

    path: str
    name: str | None = None
    split: str | None = "train"
    total_epochs: int = 1
    total_steps: int | None = None

    def preview(self, n: int = 5) -> list[dict[str, Any]]:
        """Print the first `n` rows as a JSON list and return them."""
        rows = rows_of(self)[:n]
        sys.stdout.write(json.dumps(rows, indent=2, ensure_ascii=False, default=str) + "\n")
        return rows


@dataclass(frozen=True, kw_only=True)
class WorkflowOutput:
    """Result of a workflow: a response for the judge, or the reward itself."""

    reward: float | None = None
    response: Any = None
    metrics: Mapping[str, float] | None = None


@dataclass(frozen=True, kw_only=True)
class JudgeOutput:
    """Result of a judge."""

    reward: float
    metrics: Mapping[str, float] | None = None


@dataclass(frozen=True, kw_only=True)
class PromptTuneConfig:
    """Search of `tune_prompt`. `lm_model_name` is the model that proposes prompts, as litellm names models."""

    lm_model_name: str = "dashscope/qwen-plus"
    optimization_level: str = "light"
    eval_display_progress: bool = True
    eval_display_table: int = 5
    eval_num_threads: int = 16
    compare_performance: bool = True
