"""Base class of learners whose whole state fits into this process and is saved as bytes.

A learner whose state is larger than that writes and reads its copies in parts (`headrace_trainer.ray_learner`).
"""

from __future__ import annotations

import shutil
import tempfile
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path

from headrace_runtime.process import liveness
from headrace_schemas.values.blobs import Fingerprint
from headrace_trainer.learner import OPTIMIZER, VERSION, WEIGHTS

_PIECE_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Frozen:
    """The two files of a copy, as bytes (`headrace_trainer.learner.Copy`)."""

    weights: bytes | bytearray
    optimizer: bytes | bytearray


class WholeLearner(ABC):
    """Implements `copy` and `restore` of a `headrace_trainer.learner.Learner` by three simpler methods."""

    @abstractmethod
    def freeze(self) -> Frozen:
        """Return all state that the next step depends on. The call changes nothing."""

    @abstractmethod
    def thaw(self, frozen: Frozen, *, with_random: bool) -> None:
        """Restore the state that `freeze` returned; see `Learner.restore`."""

    @abstractmethod
    def write(self, folder: Path, base: str) -> Fingerprint:
        """Write the present weights into the empty `folder`, in the layout of a version (`Copy`).

        Returns:
            The fingerprint of these weights.
        """

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
    """A copy whose files are in memory; see `headrace_trainer.learner.Copy`."""

    frozen: Frozen
    fingerprint: Fingerprint | None = None
    version: tempfile.TemporaryDirectory[str] | None = field(default=None, repr=False)

    def write(self, folder: Path) -> None:
        _write(folder / WEIGHTS, self.frozen.weights)
        _write(folder / OPTIMIZER, self.frozen.optimizer)
        if self.version is not None:
            shutil.copytree(self.version.name, folder / VERSION)
            liveness.progress()

    def drop(self) -> None:
        if self.version is not None:
            self.version.cleanup()


def _write(path: Path, content: bytes | bytearray) -> None:
    with path.open("wb") as file, memoryview(content) as view:
        for at in range(0, len(view), _PIECE_BYTES):
            file.write(view[at : at + _PIECE_BYTES])
            liveness.progress()
