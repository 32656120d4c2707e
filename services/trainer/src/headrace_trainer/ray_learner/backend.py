"""The entry point of the back end `ray`, which imports ray and torch only when it is used."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from headrace_runtime.errors import SettingError
from headrace_trainer.algorithms.presets import Needs
from headrace_trainer.backends import Backend
from headrace_trainer.ray_learner.settings import RaySettings
from headrace_trainer.torch_learner.backend import TORCH

if TYPE_CHECKING:
    from headrace_trainer.learner import Learner
    from headrace_trainer.settings import TrainerSettings


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
