"""The back end `ray`: a `Learner` whose weights and optimizer are in ranks. No tensor is in this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from headrace_runtime.process.logs import get_logger
from headrace_schemas.values.blobs import Fingerprint
from headrace_trainer.batches.batch import Batch
from headrace_trainer.learner import Abandoned, Abilities, LearnerLost, StepResult
from headrace_trainer.ray_learner import RaySettings
from headrace_trainer.ray_learner.pieces import Piece, check
from headrace_trainer.ray_learner.ranks import Ranks, marked
from headrace_trainer.settings import TrainerSettings

if TYPE_CHECKING:
    from headrace_trainer.ray_learner.rank_learner import CopyReport


@dataclass(frozen=True)
class RayCopy:
    """Snapshot of a `RayLearner` (`headrace_trainer.learner.Copy`), whose parts are in the memory of the ranks."""

    ranks: Ranks
    number: int
    sizes: Mapping[str, int]
    fingerprint: Fingerprint | None

    def write(self, folder: Path, on_weights: Callable[[], None] | None = None) -> None:
        for name, size in self.sizes.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            with (folder / name).open("xb") as file:
                file.truncate(size)
        with marked(folder) as mark:
            written: list[list[Piece] | None] = self.ranks.call_during_steps(
                "write_copy", self.number, str(folder), mark
            )
        pieces: list[Piece] = []
        for rank, own_pieces in enumerate(written):
            pieces += self._fetch_pieces(rank, folder) if own_pieces is None else own_pieces
        check(folder, self.sizes, pieces)
        if on_weights is not None:
            on_weights()

    def _fetch_pieces(self, rank: int, folder: Path) -> list[Piece]:
        """Fetch the pieces from a rank that has no access to `folder`, and write them into files there. Return them."""
        pieces: list[Piece] = self.ranks.call_rank_during_steps(rank, "pieces", self.number)
        for piece in pieces:
            with (folder / piece.file).open("rb+") as file:
                file.seek(piece.start)
                file.write(self.ranks.call_rank_during_steps(rank, "piece", self.number, piece))
        return pieces

    def drop(self) -> None:
        if self.ranks.failure is None:
            try:
                self.ranks.call_during_steps("drop", self.number)
            except LearnerLost:
                return  # the copy is lost with the learner


log = get_logger(__name__)


class RayLearner:
    """Learner whose weights are in ranks. Equal settings, including the number of ranks, give equal bytes."""

    def __init__(self, ranks: Ranks, abilities: Abilities) -> None:
        self._ranks = ranks
        self._abilities = abilities
        self._copies = 0

    @classmethod
    def open(cls, folder: Path, settings: TrainerSettings) -> RayLearner:
        """Start ranks and open a learner on them. Raises `SettingError`, `Unavailable` and `LearnerLost`."""
        chosen = settings.of("ray")
        assert isinstance(chosen, RaySettings)
        ranks = Ranks(chosen, settings.compute)
        try:
            return cls.on(ranks, folder, settings)
        except BaseException:
            ranks.close()
            raise

    @classmethod
    def on(cls, ranks: Ranks, folder: Path, settings: TrainerSettings) -> RayLearner:
        """Open a learner on running ranks. It replaces the ranks' present learner, if any."""
        chosen = settings.of("ray")
        assert isinstance(chosen, RaySettings)
        nodes = [location.node for location in ranks.locations]
        table = settings.model_dump()
        with ranks.provide_files(folder) as folders:
            calls = [
                (rank_folder, table, chosen.shard, nodes.count(node))
                for rank_folder, node in zip(folders, nodes, strict=True)
            ]
            abilities, *_ = ranks.each("open", calls)
        log.info("ranks_open", ranks=len(nodes), machines=len(set(nodes)), shard=chosen.shard)
        return cls(ranks, abilities)

    @property
    def abilities(self) -> Abilities:
        return self._abilities

    @property
    def failure(self) -> str | None:
        return self._ranks.failure

    def sequence_bound(self) -> int:
        return int(min(self._ranks.all("sequence_bound")))

    def step(self, batch: Batch, stop: threading.Event, *, from_base: bool = False) -> StepResult:
        if stop.is_set():
            raise Abandoned
        result: StepResult = self._ranks.all("step", self._ranks.shared(batch), from_base, stop=stop)[0]
        return result

    def copy(self, base: str | None) -> RayCopy:
        self._copies += 1
        copied: CopyReport = self._ranks.all("copy", self._copies, base)[0]
        return RayCopy(self._ranks, self._copies, copied.sizes, copied.fingerprint)

    def restore(self, folder: Path, *, with_random: bool) -> None:
        with self._ranks.provide_files(folder) as folders:
            self._ranks.each("restore", [(rank_folder, with_random) for rank_folder in folders])

    def load(self, folder: Path) -> None:
        with self._ranks.provide_files(folder) as folders:
            self._ranks.each("load", [(rank_folder,) for rank_folder in folders])

    def fingerprint_of_base(self) -> Fingerprint:
        answers: list[Fingerprint] = self._ranks.all("fingerprint_of_base")
        return answers[0]

    def close(self) -> None:
        self._ranks.close()
