"""What is announced as the back end `ray`: light, so that settings can be read without ray and without torch."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from headrace_runtime.errors import SettingError
from headrace_trainer.algorithms.needs import Needs
from headrace_trainer.backends import Backend
from headrace_trainer.ray_learner.settings import RaySettings
from headrace_trainer.torch_learner.backend import TORCH

if TYPE_CHECKING:
    from headrace_trainer.learner import Learner
    from headrace_trainer.settings import TrainerSettings


def _open(folder: Path, settings: TrainerSettings) -> Learner:
    _installed()
    from headrace_trainer.ray_learner.learner import RayLearner  # a second, for ray

    return RayLearner.open(folder, settings)


def _check(settings: TrainerSettings) -> None:
    """Ranks compute as the back end `torch` does, so its comparison holds for them."""
    _installed()
    if TORCH.check is not None:
        TORCH.check(settings)


def _installed() -> None:
    if find_spec("ray") is None:
        raise SettingError("trainer.backend", "ray", "Ray is not installed: pip install headrace-trainer[ray]")


RAY = Backend(
    _open,
    offers=Needs(reference=True),
    adapters=True,
    check=_check,
    check_layout=TORCH.check_layout,
    settings=RaySettings,
)
"""Weights and optimizer in ranks, which share the passes of a step."""
