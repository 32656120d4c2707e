"""One rank: a process of a Ray cluster that holds weights and optimizer, or a part of them.

It does what it is told by the trainer's process, which tells every rank the same. Files pass in pieces, whichever
machine a rank is on. torch is imported once it is needed, so that the process is there soon.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace_schemas.manifest import Fingerprint
from headrace_trainer.batches.batch import Batch
from headrace_trainer.learner import Abilities, StepResult
from headrace_trainer.ray_learner.pieces import MARK, Piece

if TYPE_CHECKING:
    from headrace_trainer.ray_learner.held import Copied, Held

_SCRATCH = "headrace-rank-"


@dataclass(frozen=True)
class Place:
    """Where a rank is."""

    node: str
    address: str
    """Of its machine, for the other ranks."""


class Rank:
    """Methods are called one at a time, but for `alive`, and those that write a copy beside a step."""

    def __init__(self, number: int, ranks: int, collective_timeout_s: float) -> None:
        # Read when torch is loaded. A thread that waits for another would else spin, on a CPU that others need.
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
        self._number = number
        self._ranks = ranks
        self._timeout = timedelta(seconds=collective_timeout_s)
        self._store: Any = None
        self._held: Held | None = None
        _sweep()

    def alive(self) -> None:
        """Never returns: who waits for it learns of this process's death."""
        threading.Event().wait()

    def place(self) -> Place:
        import ray

        address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        return Place(ray.get_runtime_context().get_node_id(), address)

    def meet(self, address: str) -> int:
        """The first rank opens a port at its own address, where all of them find each other."""
        import torch.distributed as dist

        self._store = dist.TCPStore(  # type: ignore[attr-defined]
            address, 0, self._ranks, is_master=True, timeout=self._timeout, wait_for_workers=False
        )
        return int(self._store.port)

    def join(self, own: str, address: str, port: int, device: str) -> None:
        """All of them, at once. `own`: this machine's address, whose network is used."""
        import torch.distributed as dist

        from headrace_trainer.ray_learner.network import interface_of

        if (name := interface_of(own)) is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", name)
        if self._store is None:
            self._store = dist.TCPStore(  # type: ignore[attr-defined]
                address, port, self._ranks, is_master=False, timeout=self._timeout
            )
        backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(
            backend, store=self._store, rank=self._number, world_size=self._ranks, timeout=self._timeout
        )

    def folder(self) -> str:
        """A new folder on this machine, for `put` and `forget`."""
        return tempfile.mkdtemp(prefix=f"{_SCRATCH}{os.getpid()}-")

    def put(self, folder: str, name: str, piece: bytes) -> None:
        """Append to a file in it."""
        path = Path(folder) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.write(piece)

    def forget(self, folder: str) -> None:
        shutil.rmtree(folder, ignore_errors=True)

    def open(self, folder: str, settings: Mapping[str, Any], shard: str, peers: int) -> Abilities:
        """From the base's files. `peers`: ranks on this machine. Raises `SettingError`."""
        from headrace_trainer.ray_learner.held import Held  # seconds, for torch

        self._held = None  # what was opened before gives its memory back first
        self._held = Held.open(Path(folder), settings, self._number, self._ranks, peers, in_parts=shard == "full")
        return self._held.abilities

    def sequence_bound(self) -> int:
        return self._open.sequence_bound()

    def step(self, batch: Batch, from_base: bool) -> StepResult:
        """Raises `NotFinite`, in every rank or in none."""
        return self._open.step(batch, from_base=from_base)

    def copy(self, number: int, base: str | None) -> Copied:
        """What this rank adds to copy `number`, which replaces the one before."""
        return self._open.copy(number, base)

    def write_copy(self, number: int, folder: str, mark: str) -> list[Piece] | None:
        """Beside steps, as all that is about copies below. None where this is not the folder in which the trainer has
        put its mark: another machine's, say."""
        return self._open.write_copy(number, Path(folder)) if self.sees(folder, mark) else None

    def pieces(self, number: int) -> list[Piece]:
        """What `write_copy` would have written."""
        return self._open.pieces(number)

    def piece(self, number: int, wanted: Piece) -> bytes:
        return self._open.piece(number, wanted)

    def drop(self, number: int) -> None:
        self._open.drop(number)

    def sees(self, folder: str, mark: str) -> bool:
        """Whether the trainer's folder is one of this machine's, or shared with it."""
        try:
            return (Path(folder) / MARK).read_text(encoding="ascii") == mark
        except OSError:
            return False

    def restore(self, folder: str, with_random: bool) -> None:
        self._open.restore(Path(folder), with_random=with_random)

    def load(self, folder: str) -> None:
        self._open.load(Path(folder))

    def fingerprint_of_base(self) -> Fingerprint:
        return self._open.fingerprint_of_base()

    @property
    def _open(self) -> Held:
        assert self._held is not None, "open comes first"
        return self._held


def _sweep() -> None:
    """Folders that killed ranks have left on this machine."""
    for path in Path(tempfile.gettempdir()).glob(f"{_SCRATCH}*"):
        found = re.match(rf"{_SCRATCH}(\d+)-", path.name)
        if found and not Path(f"/proc/{found[1]}").exists() and Path("/proc/self").exists():
            shutil.rmtree(path, ignore_errors=True)
