"""Trainer back ends by name: the entry points `headrace.trainer_backends` of installed packages.

Importing an entry point must be cheap; `open` imports torch and the rest. The result is a
`headrace_trainer.learner.Learner`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from headrace_runtime.registries import Registry
from headrace_runtime.settings.sections import Section
from headrace_trainer.algorithms.presets import NOTHING, Needs

if TYPE_CHECKING:
    from headrace_trainer.learner import Learner
    from headrace_trainer.settings import TrainerSettings


@dataclass(frozen=True, slots=True)
class Backend:
    """Registration of a kind of learner by a package, for example torch or Ray.

    `settings` is the class of its settings section `[trainer.<name>]`, or None without settings.
    """

    open: Callable[[Path, TrainerSettings], Learner]
    """Opens a learner from the folder that the lineage began with, which is removed once it returns. It raises
    `SettingError` when the model and the settings do not fit. Blocks. The caller must close the learner."""
    offers: Needs = NOTHING
    """The needs of algorithms that it meets. Groups and the engine's logprobs are available with every back end."""
    restricts: bool = False
    """Whether it computes logprobs over the allowed tokens of a position (`headrace_trainer.batches.batch.Row.sets`).
    Answers that were held to a grammar or truncated are not trained by other back ends."""
    adapters: bool = False
    """Whether it can train adapters (`lora.rank`)."""
    check: Callable[[TrainerSettings], None] | None = None
    """Called before a start, and only where the base is small. It raises `SettingError` for problems that would stop
    `open`."""
    check_layout: Callable[[TrainerSettings], None] | None = None
    """Called instead of `check` where the base is large. It raises `SettingError` for weights whose names and shapes do
    not fit the architecture, without reading the weights."""
    settings: type[Section] | None = None


BACKENDS: Registry[Backend] = Registry("trainer_backends", Backend, "trainer back end")
