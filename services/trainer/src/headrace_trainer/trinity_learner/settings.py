"""The section `[trainer.trinity]`, which can be read without Trinity and torch."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, SecretStr

from headrace_runtime.process.programs import VariableName
from headrace_runtime.settings.sections import Section

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]


class TrinitySettings(Section):
    """Steps by Trinity-RFT (`backend = "trinity"`)."""

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
    """How long a step may take, the start of its processes included."""
    kept_checkpoints: Annotated[int, Field(ge=2)] = 8
    """Number of checkpoints with optimizer for going back; going back further resets momentum."""
