"""Learners that have room for all of their state in this process: what they save is bytes.

One whose state no process has room for writes its copies and reads them in parts (`headrace_trainer.ray_learner`).
"""

from __future__ import annotations

import shutil
import tempfile
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path

from headrace_schemas.manifest import Fingerprint
from headrace_trainer.learner import OPTIMIZER, VERSION, WEIGHTS


@dataclass(frozen=True, slots=True)
class Frozen:
    """The two files of a copy, as bytes (`headrace_trainer.learner.Copy`)."""

    weights: bytes
    optimizer: bytes


class WholeLearner(ABC):
    """`copy` and `restore` of a `headrace_trainer.learner.Learner`, by three methods that know nothing of files of a
    lineage."""

    @abstractmethod
    def freeze(self) -> Frozen:
        """Everything that the next step depends on. Changes nothing."""

    @abstractmethod
    def thaw(self, frozen: Frozen, *, with_random: bool) -> None:
        """Go back to what `freeze` returned; see `Learner.restore`."""

    @abstractmethod
    def write(self, folder: Path, base: str) -> Fingerprint:
        """Write the present weights into the empty `folder`, as a version holds them (`Copy`). Returns what they
        answer."""

    def copy(self, base: str | None) -> WholeCopy:
        frozen = self.freeze()
        if base is None:
            return WholeCopy(frozen)
        folder = tempfile.TemporaryDirectory(prefix="headrace-version-")
        try:
            return WholeCopy(frozen, self.write(Path(folder.name), base), folder)
        except BaseException:
            folder.cleanup()
            raise

    def restore(self, folder: Path, *, with_random: bool) -> None:
        frozen = Frozen((folder / WEIGHTS).read_bytes(), (folder / OPTIMIZER).read_bytes())
        self.thaw(frozen, with_random=with_random)


@dataclass(frozen=True)
class WholeCopy:
    """See `headrace_trainer.learner.Copy`."""

    frozen: Frozen
    fingerprint: Fingerprint | None = None
    version: tempfile.TemporaryDirectory[str] | None = field(default=None, repr=False)

    def write(self, folder: Path) -> None:
        (folder / WEIGHTS).write_bytes(self.frozen.weights)
        (folder / OPTIMIZER).write_bytes(self.frozen.optimizer)
        if self.version is not None:
            shutil.copytree(self.version.name, folder / VERSION)

    def drop(self) -> None:
        if self.version is not None:
            self.version.cleanup()
