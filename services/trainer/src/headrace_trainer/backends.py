"""Trainer back ends by name: what an installed package announces under the entry points `headrace.trainer_backends`.

An announcement is light; `open` imports what it needs, and torch with it. What comes of it is a
`headrace_trainer.learner.Learner`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from headrace_runtime.registries import Registry
from headrace_runtime.settings import Section
from headrace_trainer.algorithms.needs import NOTHING, Needs

if TYPE_CHECKING:
    from headrace_trainer.learner import Learner
    from headrace_trainer.settings import TrainerSettings


@dataclass(frozen=True, slots=True)
class Backend:
    """One back end. `settings` are its own: the section `[trainer.<name>]`, `TrainerSettings.of(name)`."""

    open: Callable[[Path, TrainerSettings], Learner]
    """Gets the folder that the lineage began with, which is gone once it returns. Raises `SettingError` when the model
    and the settings do not go together. Blocks; whoever calls it closes the learner."""
    offers: Needs = NOTHING
    """What of it algorithms may need. Groups and the engine's logprobs are there for every back end."""
    adapters: bool = False
    """Whether it trains adapters (`lora.rank`) too."""
    check: Callable[[TrainerSettings], None] | None = None
    """Asked before a start, and only where the base is small: raises `SettingError` for what would stop `open`."""
    check_layout: Callable[[TrainerSettings], None] | None = None
    """Asked in the place of `check` where the base is large: raises `SettingError` for weights whose names and shapes
    are not those of the architecture, without reading the weights."""
    settings: type[Section] | None = None


BACKENDS: Registry[Backend] = Registry("trainer_backends", Backend, "trainer back end")
