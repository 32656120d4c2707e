"""A short training: a recording in, a version of a scratch lineage out."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from headrace_runtime.storage import versions as files
from headrace_runtime.storage.blobs import BlobStore
from headrace_schemas import Checkpoint, Experience
from headrace_schemas.programs.replay import ShortRun
from headrace_trainer.lineage.versions import weight_digests
from headrace_trainer.offline.short_run import ShortTraining
from headrace_trainer.settings import TrainerSettings
from tests.unit.trainer.conftest import Make
from tests.unit.trainer.world import experience

FOREIGN = ("m@000000000000", "m@111111111111", "m@222222222222")


def recording(count: int) -> list[Experience]:
    """Return experiences of three versions of another lineage, each far older than any bound."""
    return [experience(n, FOREIGN[n % 3], reward=float(n % 2), task="t") for n in range(count)]


def trained(folder: Path, settings: TrainerSettings, events: Iterable[Experience]) -> ShortRun:
    training = ShortTraining(settings, BlobStore((folder / "blobs").as_uri()))
    for event in events:
        training.add(event)
    return training.end()


def weights(folder: Path, checkpoint: Checkpoint) -> object:
    return weight_digests(files.read_manifest(BlobStore((folder / "blobs").as_uri()), checkpoint.manifest))


def test_everything_is_trained_however_old_and_what_is_left_over_too(tmp_path: Path, make: Make) -> None:
    run = trained(tmp_path, make(max_staleness=0), recording(10))
    assert (run.trained, run.dropped, run.steps) == (10, {}, 3), "batches of 4, 4 and 2"
    assert run.last.version != run.base.version
    assert weights(tmp_path, run.last) != weights(tmp_path, run.base)


def test_the_same_recording_gives_the_same_weights_and_other_rewards_give_others(tmp_path: Path, make: Make) -> None:
    events = recording(8)
    turned = [experience.model_copy(update={"reward": 1.0 - (experience.reward or 0.0)}) for experience in events]
    once, again, flipped = (
        weights(tmp_path, trained(tmp_path, make(lineage=name), some).last)
        for name, some in (("once", events), ("again", events), ("flipped", turned))
    )
    assert once == again
    assert once != flipped


def test_a_learning_rate_that_moves_nothing_ends_with_the_weights_of_the_base(tmp_path: Path, make: Make) -> None:
    run = trained(tmp_path, make(optimizer={"learning_rate": 1e-300}), recording(8))
    assert (run.steps, run.trained) == (2, 8)
    assert weights(tmp_path, run.last) == weights(tmp_path, run.base)


def test_nothing_to_train_is_the_base(tmp_path: Path, make: Make) -> None:
    run = trained(tmp_path, make(), [experience(1, FOREIGN[0], model="other")])
    assert (run.steps, run.trained, run.last) == (0, 0, run.base)
