"""The back end `ray`, announced as `RAY`, which imports ray and torch only when it is used: ranks as Ray actors hold
weights and optimizer, on this machine or on a cluster. `RaySettings` is the section `[trainer.ray]`."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, field_validator

from headrace_runtime.errors import SettingError
from headrace_runtime.settings.sections import Section
from headrace_trainer.algorithms.presets import Needs
from headrace_trainer.backends import Backend
from headrace_trainer.torch_learner import TORCH

if TYPE_CHECKING:
    from headrace_trainer.learner import Learner
    from headrace_trainer.settings import TrainerSettings


Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class RaySettings(Section):
    """Ranks that share the steps of a lineage (`backend = "ray"`)."""

    address: str = ""
    """A running cluster, as `host:port` of its head, or `auto` for the one that this machine is part of. Headrace must
    be installed on its machines, with the same Python. Empty: the trainer starts a private one on this machine, and
    stops it at its end."""
    ranks: Annotated[int, Field(ge=1, le=1024)] = 2
    """Processes that share a step, one per GPU. A lineage may continue with another number of them."""
    shard: Literal["none", "full"] = "none"
    """`none`: every rank holds the whole model. `full`: each holds a shard of weights, gradients and optimizer (FSDP2),
    for models that do not fit on one device."""
    start_timeout_s: Seconds = 300.0
    """How long cluster and ranks may take to start."""

    @field_validator("address")
    @classmethod
    def _check_address(cls, address: str) -> str:
        if "://" in address:
            raise SettingError(
                "trainer.ray.address",
                address,
                "set host:port of the cluster's head; the trainer must run on one of its machines",
            )
        return address


def _open(folder: Path, settings: TrainerSettings) -> Learner:
    _check_installed()
    from headrace_trainer.ray_learner.learner import RayLearner  # imported here, because ray takes a second

    return RayLearner.open(folder, settings)


def _check(settings: TrainerSettings) -> None:
    """Run the comparison of the back end `torch`, which also holds for ranks."""
    _check_installed()
    if TORCH.check is not None:
        TORCH.check(settings)


def _check_installed() -> None:
    if find_spec("ray") is None:
        raise SettingError("trainer.backend", "ray", "Ray is not installed: pip install headrace-trainer[ray]")


RAY = Backend(
    _open,
    offers=Needs(reference=True),
    restricts=True,
    adapters=True,
    check=_check,
    check_layout=TORCH.check_layout,
    settings=RaySettings,
)
"""Weights and optimizer in ranks, which share the passes of a step."""
