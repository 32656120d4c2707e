"""One architecture through the trainer's start, once with each packing: equal to native eager, or refused."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Literal

from pydantic import BaseModel

from headrace_runtime.errors import SettingError
from headrace_trainer.settings import TrainerSettings
from tests.architectures.catalog import Architecture

PACKINGS: tuple[Literal["blocks", "padded"], ...] = ("blocks", "padded")


class Outcome(BaseModel):
    """`difference` in nats where logprobs were compared; `refused` is the start's sentence where it refuses."""

    difference: float | None = None
    tokens: int = 0
    refused: str | None = None

    @property
    def spoken(self) -> bool:
        """Equal within the bound, or refused by the name of a setting."""
        return self.refused is not None or self.difference is not None


class Trial(BaseModel):
    """A line of `reports/architectures.json`."""

    name: str
    model_type: str
    outcomes: dict[str, Outcome]


def play(architecture: Architecture) -> Trial:
    """Build it, and start to train it."""
    with tempfile.TemporaryDirectory(prefix="architecture-") as folder:
        base = architecture.build(Path(folder))
        outcomes = {packing: _outcome(base, packing) for packing in PACKINGS}
    return Trial(name=architecture.name, model_type=architecture.model_type, outcomes=outcomes)


def _outcome(base: Path, packing: Literal["blocks", "padded"]) -> Outcome:
    from headrace_trainer.torch_learner.native import examine  # torch, which the page's own test does without

    settings = TrainerSettings.model_validate({"base": str(base), "compute": {"packing": packing, "device": "cpu"}})
    try:
        outcome = examine(settings)
    except SettingError as error:
        return Outcome(refused=str(error).replace(str(base), "models/base"))
    assert not outcome.unseen, outcome
    return Outcome(difference=outcome.difference, tokens=outcome.tokens)
