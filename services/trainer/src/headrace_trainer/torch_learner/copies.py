"""Copies of a torch learner, which take memory only if a step comes before they are written."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

from headrace_schemas.values.blobs import Fingerprint
from headrace_trainer.learner import VERSION
from headrace_trainer.whole import Frozen, WholeCopy


class TorchCopy:
    """A copy of weights and optimizer; see `headrace_trainer.learner.Copy`.

    Until `detach`, `write` reads the learner's own tensors, one at a time. The learner calls `detach` before it changes
    them. Afterwards the copy has the bytes of its files in memory, as much as a save has.
    """

    def __init__(
        self,
        write_state: Callable[[Path], None],
        freeze: Callable[[], Frozen],
        write_version: Callable[[Path], None] | None,
        fingerprint: Fingerprint | None,
    ) -> None:
        """Create a copy of the present state.

        Args:
            write_state: Writes weights and optimizer into a folder.
            freeze: Returns the same files as bytes.
            write_version: Writes the version's files into a folder. None where no version was requested.
            fingerprint: The fingerprint of the version.
        """
        self.fingerprint = fingerprint
        self._write_state = write_state
        self._freeze = freeze
        self._write_version = write_version
        self._lock = threading.Lock()
        self._detached: WholeCopy | None = None
        self._dropped = False

    def write(self, folder: Path) -> None:
        with self._lock:
            if self._detached is not None:
                self._detached.write(folder)
                return
            self._write_state(folder)
            if self._write_version is not None:
                (folder / VERSION).mkdir()
                self._write_version(folder / VERSION)

    def detach(self) -> None:
        """Copy the state into memory, unless the copy was dropped. Calling it again has no effect."""
        with self._lock:
            if self._detached is not None or self._dropped:
                return
            if self._write_version is None:
                self._detached = WholeCopy(self._freeze())
                return
            version = tempfile.TemporaryDirectory(prefix="headrace-version-")
            try:
                self._write_version(Path(version.name))
                self._detached = WholeCopy(self._freeze(), self.fingerprint, version)
            except BaseException:
                version.cleanup()
                raise

    def drop(self) -> None:
        with self._lock:
            self._dropped = True
            if self._detached is not None:
                self._detached.drop()
                self._detached = None
