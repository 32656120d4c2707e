"""The back end `trinity`, announced as `TRINITY`, which imports torch only when it is used, and never Trinity:
Trinity-RFT takes the steps, in its own processes and its own environment."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from headrace_runtime.errors import SettingError
from headrace_trainer.backends import Backend
from headrace_trainer.trinity_learner.configuration import TrinitySettings

if TYPE_CHECKING:
    from headrace_trainer.learner import Learner
    from headrace_trainer.settings import TrainerSettings


def _open(folder: Path, settings: TrainerSettings) -> Learner:
    _check(settings)
    from headrace_trainer.trinity_learner.learner import TrinityLearner

    return TrinityLearner.open(folder, settings)


def _check(settings: TrainerSettings) -> None:
    """Raise `SettingError` for settings that Trinity does not support."""
    chosen = settings.of("trinity")
    assert isinstance(chosen, TrinitySettings)
    if not chosen.folder:
        raise SettingError("trainer.trinity.folder", "", "name a folder that Trinity's processes and the trainer share")
    if find_spec("sqlalchemy") is None:
        raise SettingError("trainer.backend", "trinity", "install headrace-trainer[trinity]")
    if settings.optimizer.kind != "adamw":
        raise SettingError("trainer.optimizer.kind", settings.optimizer.kind, 'the back end trinity has "adamw"')
    if settings.loss.kind != "clipped":
        raise SettingError("trainer.loss.kind", settings.loss.kind, 'the back end trinity computes "clipped"')
    if settings.loss.updates_per_step != 1:
        raise SettingError(
            "trainer.loss.updates_per_step", settings.loss.updates_per_step, "the back end trinity has 1"
        )


TRINITY = Backend(_open, check=_check, settings=TrinitySettings)
"""Steps by Trinity-RFT: a batch at a time through its database, and its checkpoints as versions."""
