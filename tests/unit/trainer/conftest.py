"""Fixtures for the trainer: a tiny base model, which is built once, and its settings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace_runtime.settings.sections import complete
from headrace_trainer.settings import TrainerSettings
from tests.support import tiny_model

Make = Callable[..., TrainerSettings]
SMALL: dict[str, Any] = {
    "model": "m",
    "batch_experiences": 4,
    "batch_experiences_min": 1,
    "steps_per_version": 1,
    "max_staleness": 4,
    "save_interval_s": 1e-9,
    "retry_s": 0.5,
    "optimizer": {"learning_rate": 1e-3},
}
"""Eager tests: batches of 4, a version per step, outcomes saved at once."""


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a float32 base model with one layer. Opening a lineage on it takes 15 ms."""
    torch.set_num_threads(1)
    return tiny_model.build(tmp_path_factory.mktemp("trainer") / "base", layers=1)


@pytest.fixture
def make(base: Path) -> Make:
    """Return a function that creates settings with small batches and short delays."""

    def _make(**overrides: Any) -> TrainerSettings:
        return complete(TrainerSettings).model_validate({"base": str(base), **SMALL, **overrides})

    return _make
