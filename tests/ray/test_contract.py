"""The contract of learners for two ranks: complete weights, sharded weights, and adapters."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

pytest.importorskip("ray", reason="Ray is not installed: pip install headrace-trainer[ray]")

from headrace_runtime.settings.sections import complete
from headrace_trainer.learner import OPTIMIZER, WEIGHTS, Copy, Learner, LearnerLost
from headrace_trainer.ray_learner import RaySettings
from headrace_trainer.ray_learner import learner as ray_learner
from headrace_trainer.ray_learner.cluster import Cluster
from headrace_trainer.ray_learner.learner import RayLearner
from headrace_trainer.ray_learner.ranks import Ranks
from headrace_trainer.settings import TrainerSettings
from headrace_trainer.torch_learner.learner import TorchLearner
from tests.contract.learner.promises import GOING_ON, PROMISES, VERSION, Opener, Promise, batch, files, new
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
    created = Pool()
    try:
        yield created
    finally:
        created.close()
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


MUON = {"learning_rate": 1e-2, "kind": "muon"}


@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.__name__)
@pytest.mark.parametrize("kind", KINDS)
def test_ranks(promise: Promise, kind: str, pool: Pool, base: Path, tmp_path: Path) -> None:
    try:
        promise(Opener(base, lambda lineage: pool.open(base, lineage, KINDS[kind])), tmp_path)
    finally:
        pool.give_back()


@pytest.fixture(scope="session")
def rounded_base(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model in bfloat16: its versions are rounded."""
    folder = tmp_path_factory.mktemp("ray") / "rounded"
    shutil.copytree(base, folder)
    weights = load_file(folder / "model.safetensors")
    save_file(
        {name: tensor.bfloat16() for name, tensor in weights.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    return folder


def written(copy: Copy, folder: Path) -> Mapping[str, bytes]:
    copy.write(new(folder.parent, folder.name))
    return files(folder)


@pytest.mark.parametrize("kind", ["in parts", "whole", "muon in parts"])
def test_ranks_write_what_one_process_writes(
    kind: str, pool: Pool, rounded_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """State and version, byte for byte; and so they do where they do not see the trainer's folder."""
    more = KINDS.get(kind, {"ray": {"shard": "full"}, "optimizer": MUON})
    ranks = pool.open(rounded_base, "main", more)
    ranks.step(batch(0), GOING_ON)
    copy = ranks.copy(VERSION)
    ranks.step(batch(10), GOING_ON)
    by_ranks = written(copy, tmp_path / "ranks")
    assert set(by_ranks) == {WEIGHTS, OPTIMIZER, "version/model.safetensors"}
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(ray_learner, "marked", lambda folder: contextlib.nullcontext("another folder"))
        assert written(copy, tmp_path / "fetched") == by_ranks
    copy.drop()
    table = settings_of(rounded_base, "main", {**more, "backend": "torch"}).model_dump(exclude={"ray"})
    alone = TorchLearner.open(rounded_base, complete(TrainerSettings).model_validate(table))
    alone.restore(tmp_path / "ranks", with_random=True)
    by_one_process = alone.copy(VERSION)
    assert written(by_one_process, tmp_path / "alone") == by_ranks
    by_one_process.drop()
    assert copy.fingerprint is not None
    assert by_one_process.fingerprint is not None
    assert copy.fingerprint.logprobs == pytest.approx(by_one_process.fingerprint.logprobs, abs=1e-5)
    ranks.restore(tmp_path / "alone", with_random=True)
    again = ranks.copy(None)
    assert written(again, tmp_path / "again") == {name: by_ranks[name] for name in (WEIGHTS, OPTIMIZER)}
    again.drop()
    pool.give_back()


def test_steps_go_on_while_ranks_write(pool: Pool, base: Path, tmp_path: Path) -> None:
    busy, calm = (pool.open(base, "main", KINDS["in parts"]) for _ in range(2))
    copies = []
    for learner, beside in ((busy, True), (calm, False)):
        learner.step(batch(0), GOING_ON)
        copy = learner.copy(VERSION)
        with ThreadPoolExecutor(1) as thread:
            writing = thread.submit(written, copy, tmp_path / f"then {beside}") if beside else None
            for first in (10, 20, 30):
                learner.step(batch(first), GOING_ON)
            then = writing.result() if writing is not None else written(copy, tmp_path / f"then {beside}")
        copy.drop()
        end = learner.copy(None)
        copies.append((then, written(end, tmp_path / f"end {beside}")))
        end.drop()
    assert copies[0] == copies[1]
    pool.give_back()


def test_a_disk_that_refuses_is_no_loss(pool: Pool, base: Path, tmp_path: Path) -> None:
    ranks = pool.open(base, "main", KINDS["in parts"])
    copy = ranks.copy(None)
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / WEIGHTS).touch()
    with pytest.raises(OSError, match=WEIGHTS):
        copy.write(tmp_path / "there")
    assert ranks.failure is None
    assert set(written(copy, tmp_path / "free")) == {WEIGHTS, OPTIMIZER}
    copy.drop()
    pool.give_back()


@pytest.mark.parametrize("fault", ["a rank has died", "another copy is held"])
def test_a_copy_of_which_a_part_is_missing_is_lost(fault: str, pool: Pool, base: Path, tmp_path: Path) -> None:
    import ray

    ranks = pool.open(base, "main", KINDS["in parts"])
    assert isinstance(ranks, RayLearner)
    copy = ranks.copy(None)
    if fault == "a rank has died":
        ray.kill(ranks._ranks._actors[1])
    else:
        ranks.copy(None)
    with pytest.raises(LearnerLost, match=r"rank 1 .* has died|copy 1 is asked for, and copy 2 is held"):
        copy.write(tmp_path)
    assert ranks.failure is not None
    copy.drop()
    ranks.close()
    pool.give_back()


def test_a_lost_rank_is_said_at_once_and_by_every_call(pool: Pool, base: Path) -> None:
    import ray

    ranks = pool.open(base, "main", {})
    assert isinstance(ranks, RayLearner)
    assert ranks.failure is None
    ray.kill(ranks._ranks._actors[1])
    with pytest.raises(LearnerLost, match="rank 1"):
        ranks.step(batch(0), GOING_ON)
    assert "rank 1" in str(ranks.failure)
    with pytest.raises(LearnerLost):
        ranks.copy(None)
    ranks.close()
    ranks.close()
    pool.give_back()
