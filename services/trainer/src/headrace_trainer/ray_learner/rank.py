"""Rank: a process of a Ray cluster that holds weights and optimizer, or a shard of them.

It executes the calls of the trainer's process, which calls every rank in the same way. Files are sent in pieces,
whichever machine a rank is on. torch is imported when it is first needed, so that the process starts fast.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace_runtime.process import liveness
from headrace_schemas.values.blobs import Fingerprint
from headrace_trainer.batches.batch import Batch
from headrace_trainer.learner import Abilities, StepResult
from headrace_trainer.ray_learner.pieces import MARK, Piece

if TYPE_CHECKING:
    from headrace_trainer.ray_learner.rank_learner import CopyReport, RankLearner

_SCRATCH = "headrace-rank-"


@dataclass(frozen=True)
class RankLocation:
    """Machine on which a rank runs."""

    node: str
    address: str
    """Address of the machine, for the other ranks."""


class Rank:
    """Ray actor of one rank.

    Its methods are called one at a time, except `alive`, and those that write a copy during a step.
    """

    def __init__(self, number: int, ranks: int, collective_timeout_s: float) -> None:
        # Read when torch is loaded. Otherwise a waiting thread would spin on a CPU that other processes need.
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
        self._number = number
        self._ranks = ranks
        self._timeout = timedelta(seconds=collective_timeout_s)
        self._store: Any = None
        self._learner: RankLearner | None = None
        _sweep()

    def alive(self) -> None:
        """Wait forever, so that a caller that waits for the result gets an error when this process dies."""
        threading.Event().wait()

    def place(self) -> RankLocation:
        import ray

        address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        return RankLocation(ray.get_runtime_context().get_node_id(), address)

    def meet(self, address: str) -> int:
        """Open the store to which all ranks connect, at the first rank's `address`, and return its port."""
        import torch.distributed as dist

        self._store = dist.TCPStore(  # type: ignore[attr-defined]
            address, 0, self._ranks, is_master=True, timeout=self._timeout, wait_for_workers=False
        )
        return int(self._store.port)

    def join(self, own_address: str, address: str, port: int, device: str) -> None:
        """Make this process a member of the `torch.distributed` process group of the learner. It blocks until all ranks
        have joined.

        Args:
            own_address: address of this rank's machine; it determines the network interface for NCCL and Gloo.
            address: address of the first rank.
            port: port of the first rank's store, as `meet` returned it.
            device: device of the ranks, `cpu` or `cuda`.
        """
        import torch.distributed as dist

        from headrace_trainer.ray_learner.cluster import interface_of

        if (name := interface_of(own_address)) is not None:
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
        """Create a temporary folder on this machine for files that `put` receives, and return its path."""
        scratch = Path(tempfile.mkdtemp(prefix=_SCRATCH))
        liveness.claim_folder(scratch)
        (scratch / "files").mkdir()
        return str(scratch / "files")

    def put(self, folder: str, name: str, piece: bytes) -> None:
        """Append `piece`, the next bytes of the file `name`, to that file in `folder`."""
        path = Path(folder) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.write(piece)

    def forget(self, folder: str) -> None:
        shutil.rmtree(Path(folder).parent, ignore_errors=True)

    def open(self, folder: str, settings: Mapping[str, Any], shard: str, peers: int) -> Abilities:
        """Open the learner from the base's files. Raises `SettingError`.

        Args:
            folder: folder with the base's files.
            settings: whole table of `[trainer]`.
            shard: `trainer.ray.shard`.
            peers: number of ranks on this machine.
        """
        from headrace_trainer.ray_learner.rank_learner import RankLearner  # imported here, because torch takes seconds

        self._learner = None  # frees the memory of the last learner first
        self._learner = RankLearner.open(
            Path(folder), settings, self._number, self._ranks, peers, in_parts=shard == "full"
        )
        return self._learner.abilities

    def sequence_bound(self) -> int:
        return self._opened_learner.sequence_bound()

    def step(self, batch: Batch, from_base: bool) -> StepResult:
        """Take a step. Raises `NotFinite` in every rank or in none."""
        return self._opened_learner.step(batch, from_base=from_base)

    def copy(self, number: int, base: str | None) -> CopyReport:
        """Copy this rank's ranges of the weights and optimizer files into memory, as its part of snapshot `number`.

        They replace those of the last snapshot. `write_copy` writes them to files; `pieces` and `piece` return them.
        """
        return self._opened_learner.copy(number, base)

    def write_copy(self, number: int, folder: str, mark: str) -> list[Piece] | None:
        """Write this rank's ranges of a snapshot (see `copy`) into the files in the trainer's folder, if this machine
        has that folder.

        Like the other methods for snapshots, it may run during a step.

        Args:
            number: number of the snapshot.
            folder: path of the trainer's folder.
            mark: content of the file `MARK` in the trainer's folder.

        Returns:
            The pieces that were written, or None if `folder` has no such file, for example on another machine.
        """
        return self._opened_learner.write_copy(number, Path(folder)) if self.sees(folder, mark) else None

    def pieces(self, number: int) -> list[Piece]:
        """Return file, start, size and checksum of each piece of this rank's part of snapshot `number` (see `copy`).

        The trainer's process passes each result to `piece`, which returns the bytes.
        """
        return self._opened_learner.pieces(number)

    def piece(self, number: int, piece: Piece) -> bytes:
        return self._opened_learner.piece(number, piece)

    def drop(self, number: int) -> None:
        self._opened_learner.drop(number)

    def sees(self, folder: str, mark: str) -> bool:
        """Return whether `folder` on this machine is the trainer's own folder: its file `MARK` contains `mark`.

        On another machine than the trainer's, this is true only with a shared file system.
        """
        try:
            return (Path(folder) / MARK).read_text(encoding="ascii") == mark
        except OSError:
            return False

    def restore(self, folder: str, with_random: bool) -> None:
        self._opened_learner.restore(Path(folder), with_random=with_random)

    def load(self, folder: str) -> None:
        self._opened_learner.load(Path(folder))

    def fingerprint_of_base(self) -> Fingerprint:
        return self._opened_learner.fingerprint_of_base()

    @property
    def _opened_learner(self) -> RankLearner:
        assert self._learner is not None, "call open first"
        return self._learner


def _sweep() -> None:
    """Remove folders of killed ranks on this machine."""
    for scratch in liveness.abandoned_folders(Path(tempfile.gettempdir()), f"{_SCRATCH}*"):
        shutil.rmtree(scratch, ignore_errors=True)
