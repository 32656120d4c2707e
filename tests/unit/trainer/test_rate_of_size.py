"""The default learning rate by the size of the model, through measured points."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace_runtime.clock import SystemClock
from headrace_runtime.storage.blobs import BlobStore
from headrace_trainer.lineage.opening import open_lineage
from headrace_trainer.settings import OptimizerSettings
from tests.support.torch_learners import optimizer_of, policy_of
from tests.unit.trainer.conftest import Make


@pytest.mark.parametrize(
    ("parameters", "adapters", "rate"),
    [
        (5_000, False, 1e-4),
        (400_000, False, 1e-4),
        (400_000, True, 1e-3),
        (1_700_000_000, False, 3.2e-6),
        (7_000_000_000, False, 1.6e-6),
    ],
)
def test_it_falls_with_the_root_of_the_parameters(parameters: int, *, adapters: bool, rate: float) -> None:
    assert OptimizerSettings().of_size(parameters, adapters=adapters).rate == pytest.approx(rate)


def test_what_is_set_stays() -> None:
    assert OptimizerSettings(learning_rate=0.5).of_size(7, adapters=True).rate == 0.5


def test_a_lineage_trains_with_that_of_its_model(tmp_path: Path, make: Make) -> None:
    settings = make(optimizer={})
    lineage = open_lineage(settings, BlobStore((tmp_path / "blobs").as_uri()), SystemClock())
    expected = settings.optimizer.of_size(policy_of(lineage).size, adapters=False).rate
    assert optimizer_of(lineage).learning_rate == expected
    assert expected == 1e-4
