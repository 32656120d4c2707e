"""The trainer back end `counted`: `torch` with an additional metric of the trained rows."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from headrace_runtime.settings.sections import Section
from headrace_trainer.algorithms.needs import Needs
from headrace_trainer.backends import Backend

if TYPE_CHECKING:
    from headrace_trainer.learner import Learner
    from headrace_trainer.settings import TrainerSettings


class CountedSettings(Section):
    """Settings in the section `[trainer.counted]`."""

    already: int = 0
    """Number of rows with which the count starts."""


def _open(folder: Path, settings: TrainerSettings) -> Learner:
    from headrace_stranger.counted import CountedLearner
    from headrace_trainer.torch_learner.learner import TorchLearner

    options = settings.of("counted")
    assert isinstance(options, CountedSettings)
    learner: Learner = CountedLearner(TorchLearner.open(folder, settings), options.already)
    return learner


COUNTED = Backend(_open, offers=Needs(reference=True), settings=CountedSettings)
