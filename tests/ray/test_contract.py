"""What every learner promises, asked of two ranks: whole weights, weights in parts, and adapters."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install headrace-trainer[ray]")

from headrace_runtime.settings import complete
from headrace_trainer.learner import Learner, LearnerLost
from headrace_trainer.ray_learner.cluster import Cluster
from headrace_trainer.ray_learner.learner import RayLearner
from headrace_trainer.ray_learner.ranks import Ranks
from headrace_trainer.ray_learner.settings import RaySettings
from headrace_trainer.settings import TrainerSettings
from tests.contract.learner.promises import GOING_ON, PROMISES, Opener, Promise, batch
from tests.support import tiny_model

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.build(tmp_path_factory.mktemp("ray") / "base", layers=2)


class Pool:
    """Ranks that are used again: a process takes seconds to start, and a promise needs up to three learners at once."""

    def __init__(self) -> None:
        self._free: list[Ranks] = []
        self._used: list[Ranks] = []

    def open(self, base: Path, lineage: str, more: dict[str, Any]) -> Learner:
        settings = settings_of(base, lineage, more)
        chosen = settings.of("ray")
        assert isinstance(chosen, RaySettings)
        ranks = self._free.pop() if self._free else Ranks(chosen, settings.compute)
        self._used.append(ranks)
        return RayLearner.on(ranks, base, settings)

    def give_back(self) -> None:
        self._free += [ranks for ranks in self._used if ranks.failure is None]
        self._used.clear()

    def close(self) -> None:
        for ranks in (*self._free, *self._used):
            ranks.close()


def settings_of(base: Path, lineage: str, more: dict[str, Any]) -> TrainerSettings:
    table: dict[str, Any] = {
        "base": str(base),
        "lineage": lineage,
        "backend": "ray",
        "optimizer": {"learning_rate": 1e-2},
        "native": {"tokens": 0},
        "compute": {"device": "cpu"},
    }
    return complete(TrainerSettings).model_validate({**table, **more})


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Three learners of two ranks need six places, so the cluster has as many, whatever this machine has."""
    cluster = Cluster(RaySettings(start_timeout_s=280), 8)
    made = Pool()
    try:
        yield made
    finally:
        made.close()
        cluster.leave()


KINDS: dict[str, dict[str, Any]] = {
    "whole": {},
    "in parts": {"ray": {"shard": "full"}},
    "adapters in parts, two updates and the base": {
        "ray": {"shard": "full"},
        "lora": {"rank": 4},
        "loss": {"updates_per_step": 2, "kl": 0.01},
    },
}


@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.__name__)
@pytest.mark.parametrize("kind", KINDS)
def test_ranks(promise: Promise, kind: str, pool: Pool, base: Path, tmp_path: Path) -> None:
    try:
        promise(Opener(base, lambda lineage: pool.open(base, lineage, KINDS[kind])), tmp_path)
    finally:
        pool.give_back()


def test_a_lost_rank_is_said_at_once_and_by_every_call(pool: Pool, base: Path) -> None:
    import ray

    ours = pool.open(base, "main", {})
    assert isinstance(ours, RayLearner)
    assert ours.failure is None
    ray.kill(ours._ranks._actors[1])
    with pytest.raises(LearnerLost, match="rank 1"):
        ours.step(batch(0), GOING_ON)
    assert "rank 1" in str(ours.failure)
    with pytest.raises(LearnerLost):
        ours.copy(None)
    ours.close()
    ours.close()
    pool.give_back()
