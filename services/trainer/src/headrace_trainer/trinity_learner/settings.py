"""The section `[trainer.trinity]`. Light: read without Trinity and without torch."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, SecretStr

from headrace_runtime.program_environment import VariableName
from headrace_runtime.settings import Section

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]


class TrinitySettings(Section):
    """Steps by Trinity-RFT (`backend = "trinity"`)."""

    folder: str = ""
    """Where its jobs and checkpoints are: a disk that its processes and the trainer share. Required, and the same at
    every start."""
    command: Annotated[tuple[str, ...], Field(min_length=1)] = ("trinity", "run", "--config")
    """The program that trains; the name of the configuration is added. Trinity is installed in an environment of its
    own, so this is usually a path."""
    environment: tuple[VariableName, ...] = ()
    """Environment variables of the trainer that this program gets besides the system's own, for example
    `RAY_AUTH_TOKEN`."""
    buffer_url: SecretStr = SecretStr("")
    """The database that batches are handed over in: `postgresql://user:password@host/database`; empty: an SQLite file
    in `folder`."""
    algorithm: Annotated[str, Field(min_length=1)] = "grpo"
    """Trinity's `algorithm_type`. One that takes advantages as they come; they are those of `trainer.advantage`."""
    temperature: Positive = 1.0
    """The temperature that it trains at. Experiences that were sampled at another one have no part in its loss."""
    nodes: Count = 1
    """Machines of its cluster."""
    gpus_per_node: Count = 1
    """GPUs of each."""
    ray_address: str = "auto"
    """Its Ray cluster."""
    step_timeout_s: Positive = 7200.0
    """How long a step may take, the start of its processes included."""
    attempts: Count = 3
    """How often a batch is handed over to a new job, where the job before has ended without its step."""
    kept_checkpoints: Annotated[int, Field(ge=2)] = 8
    """Checkpoints with optimizer that are kept to go back to; where one is gone, going back forgets momentum."""
