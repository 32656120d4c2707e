"""What lies in the folder that Trinity and the trainer share: models, checkpoints with optimizer, jobs, and which batch
was handed over last.

    base/               the model that the lineage began with
    models/<digest>/    a whole model: weights, and the base's other files
    kept/<digest>/      Trinity's checkpoint of the step that made these weights
    jobs/               Trinity's own: configurations, logs, databases, one folder per job
    pending.json        the batch that was handed over last

Everything but `jobs/` appears whole or not at all: it is made under another name and then renamed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from headrace_runtime import versions
from headrace_schemas.base import Model, Sha256
from headrace_trainer.trinity_learner.configuration import TrinityJob

_DRAFT = ".draft-"
_WEIGHTS_CHUNK = 1 << 24


class Pending(Model):
    """A batch that was handed over: durable before Trinity can see it."""

    start: Sha256
    """The weights that it was cut for."""
    batch: Sha256
    job: str
    step: int
    """The number of Trinity's step that has it."""


class Disk:
    """One process at a time may write."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self.base = self.folder / "base"
        self.jobs = self.folder / "jobs"
        self.jobs.mkdir(parents=True, exist_ok=True)

    def model(self, digest: str) -> Path:
        return self.folder / "models" / digest

    def kept(self, digest: str) -> Path:
        return self.folder / "kept" / digest

    def put_base(self, folder: Path) -> None:
        """Copies it, whatever was there."""
        with self.appearing(self.base) as draft:
            for path in versions.model_files(folder):
                _copy(path, draft / path.relative_to(folder))

    def put_model(self, weights: Sequence[Path]) -> str:
        """A whole model with these weights, by its digest."""
        digest = digest_of(weights)
        if not self.model(digest).exists():
            with self.appearing(self.model(digest)) as draft:
                for path in versions.model_files(self.base):
                    if not versions.is_weights(path.name):
                        _link(path, draft / path.relative_to(self.base))
                for path in weights:
                    _link(path, draft / path.name)
        _touch(self.model(digest))
        return digest

    def keep(self, digest: str, checkpoint: Path) -> None:
        """Trinity's folder of a step, which it may remove afterwards."""
        if not self.kept(digest).exists():
            with self.appearing(self.kept(digest)) as draft:
                copied = shutil.copytree(checkpoint, draft / checkpoint.name, copy_function=_link)
                (draft / "step").write_text(str(copied).rpartition("_")[2], encoding="ascii")
        _touch(self.kept(digest))

    def begin(self, job: TrinityJob, digest: str | None) -> int:
        """The job's folder, with what was kept of these weights in it. Returns the number of its last step."""
        job.folder.mkdir(parents=True)
        if digest is None:
            return 0
        kept = self.kept(digest)
        step = int((kept / "step").read_text(encoding="ascii"))
        shutil.copytree(kept / f"global_step_{step}", job.folder / f"global_step_{step}", copy_function=_link)
        (job.folder / "trainer_meta.json").write_text(
            json.dumps({"latest_iteration": step, "sample_strategy_state": {}}), encoding="utf-8"
        )
        for name in ("latest_state_dict_iteration.txt", "latest_checkpointed_iteration.txt"):
            (job.folder / name).write_text(str(step), encoding="ascii")
        return step

    def pending(self) -> Pending | None:
        path = self.folder / "pending.json"
        return Pending.model_validate_json(path.read_bytes()) if path.exists() else None

    def set_pending(self, pending: Pending) -> None:
        """Durable when it returns."""
        path = self.folder / "pending.json"
        draft = path.with_name(_DRAFT + path.name)
        with draft.open("wb") as file:
            file.write(pending.model_dump_json().encode())
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
        _sync(self.folder)

    def sweep(self, jobs: Sequence[str], used: Sequence[str], most: int) -> None:
        """Remove jobs but these, and models and checkpoints but these and the newest."""
        for path in (*self.jobs.glob("*/j*"), *self.jobs.glob("j*")):
            if path.name.partition(".")[0] not in jobs:
                _remove(path)
        for kind in ("models", "kept"):
            found = [path for path in (self.folder / kind).glob("*") if not path.name.startswith(_DRAFT)]
            found.sort(key=lambda path: -path.stat().st_mtime_ns)
            for path in found[most:]:
                if path.name not in used:
                    _remove(path)
            for path in (self.folder / kind).glob(f"{_DRAFT}*"):
                _remove(path)

    @contextmanager
    def appearing(self, path: Path) -> Iterator[Path]:
        """A folder to fill, which is `path` afterwards."""
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f"{_DRAFT}{uuid.uuid4().hex}")
        draft.mkdir()
        try:
            yield draft
            _remove(path)
            draft.rename(path)
            _sync(path.parent)
        except BaseException:
            _remove(draft)
            raise


def weights_in(folder: Path) -> list[Path]:
    """The weights of a model's folder."""
    return [path for path in versions.model_files(folder) if versions.is_weights(path.name)]


def step_of(job: TrinityJob) -> int:
    """The last step that Trinity has saved whole, by its own word; 0 before the first."""
    try:
        return int((job.folder / "latest_checkpointed_iteration.txt").read_text(encoding="ascii"))
    except (OSError, ValueError):  # not there yet, or being written
        return 0


def checkpoint_of(job: TrinityJob, step: int) -> Path:
    return job.folder / f"global_step_{step}"


def weights_of(checkpoint: Path) -> list[Path]:
    """In the names that transformers has for them."""
    return weights_in(checkpoint / "actor" / "huggingface")


def digest_of(weights: Sequence[Path]) -> str:
    """Of names and contents."""
    digest = hashlib.sha256()
    for path in sorted(weights, key=lambda one: one.name):
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            while piece := file.read(_WEIGHTS_CHUNK):
                digest.update(piece)
    return digest.hexdigest()


def _link(source: str | Path, target: str | Path) -> str:
    """The same file under another name, where the disk can; Trinity and we replace files and never write into them."""
    Path(target).parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
    return str(target)


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(source, target)


def _touch(path: Path) -> None:
    os.utime(path)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
