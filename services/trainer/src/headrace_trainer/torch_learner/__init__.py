"""The back end `torch`, announced as `TORCH`, which imports torch only when it is used: weights and optimizer are in
the trainer's own process, on one device."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from headrace_trainer.algorithms.presets import Needs
from headrace_trainer.backends import Backend

if TYPE_CHECKING:
    from headrace_trainer.learner import Learner
    from headrace_trainer.settings import TrainerSettings


def _open(folder: Path, settings: TrainerSettings) -> Learner:
    from headrace_trainer.torch_learner.learner import TorchLearner  # seconds, for torch

    return TorchLearner.open(folder, settings)


def _check(settings: TrainerSettings) -> None:
    if settings.native.tokens:
        from headrace_trainer.torch_learner.native import compare_base

        compare_base(settings)


def _check_layout(settings: TrainerSettings) -> None:
    if settings.native.tokens:
        from headrace_trainer.torch_learner.model import configuration  # seconds, for torch

        configuration.check_layout(Path(settings.base))


_OFFERS = Needs(reference=True, pairs=True, critic=True, teacher=True, hindsight=True)
TORCH = Backend(_open, offers=_OFFERS, restricts=True, adapters=True, check=_check, check_layout=_check_layout)
"""Weights and optimizer in the trainer's own process, on one device."""
