"""The section `[trainer.trinity]`, and Trinity's YAML configuration that the trainer builds from its settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import yaml
from pydantic import Field, SecretStr

from headrace_runtime.process.programs import VariableName
from headrace_runtime.settings.sections import Section
from headrace_trainer.settings import TrainerSettings

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]


class TrinitySettings(Section):
    """Steps by Trinity-RFT (`backend = "trinity"`)."""

    PARAMETERS: ClassVar = ("algorithm", "step_timeout_s")

    folder: str = ""
    """Folder of its jobs and checkpoints, on a disk that its processes and the trainer share. Required, and the same at
    every start."""
    command: Annotated[tuple[str, ...], Field(min_length=1)] = ("trinity", "run", "--config")
    """The program that trains; the name of the configuration is appended. Trinity is installed in an environment of its
    own, so this is usually a path."""
    environment: tuple[VariableName, ...] = ()
    """Environment variables of the trainer that this program gets besides the system's own, for example
    `RAY_AUTH_TOKEN`."""
    buffer_url: SecretStr = SecretStr("")
    """The database for batches: `postgresql://user:password@host/database`; empty: an SQLite file in `folder`."""
    algorithm: Annotated[str, Field(min_length=1)] = "grpo"
    """Trinity's `algorithm_type`. It must use given advantages; they are those of `trainer.advantage`."""
    temperature: Positive = 1.0
    """Temperature of the training. Experiences that were sampled at another one are left out of its loss."""
    nodes: Count = 1
    """Machines of its cluster."""
    gpus_per_node: Count = 1
    """GPUs per machine."""
    ray_address: str = "auto"
    """Address of its Ray cluster."""
    step_timeout_s: Positive = 7200.0
    """How long a step may take, the start of its processes included: longer than a batch of a large model on one
    GPU."""
    kept_checkpoints: Annotated[int, Field(ge=2)] = 8
    """Number of checkpoints with optimizer for going back; going back further resets momentum."""


PROJECT = "headrace"
BUFFER = "experiences"
_FOR_EVER_S = 1e9
_WEIGHT_BYTES = {"bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class TrinityJob:
    """One training job of Trinity-RFT: working folder, name, initial model and batch size."""

    root: Path
    name: str
    model: Path
    size: int
    """Rows of a batch."""

    @property
    def folder(self) -> Path:
        """Folder of Trinity's results for this job."""
        return self.root / PROJECT / self.name

    @property
    def buffer_name(self) -> str:
        """Name of the job's table. Jobs that share a database have different tables."""
        return f"{BUFFER}_{self.name}"

    def buffer_url(self, chosen: TrinitySettings) -> str:
        return chosen.buffer_url.get_secret_value() or f"sqlite:///{self.root / f'{self.name}.db'}"


def size_of(settings: TrainerSettings, rows: int) -> int:
    """Return the number of rows of Trinity's batches for at least `rows` rows: a multiple of the number of GPUs."""
    chosen = _chosen(settings)
    gpus = chosen.nodes * chosen.gpus_per_node
    least = max(settings.batch_experiences, rows)
    return -(-least // gpus) * gpus


def context_of(config: Mapping[str, Any]) -> int:
    """Return the longest sequence, in tokens, that the model of this `config.json` was made for."""
    return int(_text(config).get("max_position_embeddings", 1 << 20))


def vocabulary_of(config: Mapping[str, Any]) -> int:
    return int(_text(config)["vocab_size"])


def rate_of(settings: TrainerSettings, base: Path, config: Mapping[str, Any]) -> float:
    """Return the learning rate, which depends on the model's size unless it is set."""
    weight_bytes = _WEIGHT_BYTES.get(str(config.get("dtype") or config.get("torch_dtype")), 4)
    size = sum(path.stat().st_size for path in base.glob("*.safetensors")) // weight_bytes
    return settings.optimizer.with_rate_for_size(max(1, size), adapters=False).rate


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    text_config: Mapping[str, Any] = config.get("text_config", config)
    return text_config


def configuration(settings: TrainerSettings, job: TrinityJob, rate: float, context: int) -> Mapping[str, Any]:
    """Return Trinity's configuration of a job.

    Args:
        settings: the trainer's settings.
        job: the job.
        rate: learning rate.
        context: longest sequence in tokens.
    """
    chosen, optimizer, loss = _chosen(settings), settings.optimizer, settings.loss
    return {
        "mode": "train",
        "project": PROJECT,
        "name": job.name,
        "ray_namespace": f"{PROJECT}/{job.name}",  # separate from actors that an earlier job has left on the cluster
        "checkpoint_root_dir": str(job.root),
        "model": {
            "model_path": str(job.model),
            "max_model_len": context,
            "temperature": chosen.temperature,
            "enable_prompt_truncation": False,
        },
        "algorithm": {
            "algorithm_type": chosen.algorithm,
            "optimizer": {
                "lr": rate,
                "lr_warmup_steps": optimizer.warmup_updates,
                "betas": [optimizer.beta1, optimizer.beta2],
                "weight_decay": optimizer.weight_decay,
                "clip_grad": optimizer.gradient_norm_max,
            },
            "policy_loss_fn_args": {"clip_range_low": loss.clip_low, "clip_range_high": loss.clip_high},
            "kl_loss_fn": "none",
            "entropy_loss_fn": "none",
            "loss_agg_mode": "token-mean",
        },
        "buffer": {
            "batch_size": job.size,
            "train_batch_size": job.size,
            "trainer_input": {
                "experience_buffer": {
                    "name": job.buffer_name,
                    "storage_type": "sql",
                    "path": job.buffer_url(chosen),
                    "max_read_timeout": _FOR_EVER_S,
                }
            },
        },
        "trainer": {
            "save_interval": 1,
            "save_hf_checkpoint": "always",
            "max_checkpoints_to_keep": 2,
            "grad_clip": optimizer.gradient_norm_max,
        },
        "synchronizer": {"sync_method": "checkpoint", "sync_style": "fixed", "sync_interval": 1},
        "cluster": {
            "ray_address": chosen.ray_address,
            "node_num": chosen.nodes,
            "gpu_per_node": chosen.gpus_per_node,
        },
        "monitor": {"monitor_type": "tensorboard"},
    }


def as_yaml(configuration_table: Mapping[str, Any]) -> str:
    return yaml.safe_dump(dict(configuration_table), sort_keys=False)


def _chosen(settings: TrainerSettings) -> TrinitySettings:
    chosen = settings.of("trinity")
    assert isinstance(chosen, TrinitySettings)
    return chosen
