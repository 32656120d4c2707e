"""A copy that ranks hold: each writes its own ranges of the files where it can access the folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from headrace_schemas.values.blobs import Fingerprint
from headrace_trainer.learner import LearnerLost
from headrace_trainer.ray_learner.pieces import Piece, check
from headrace_trainer.ray_learner.ranks import Ranks, marked


@dataclass(frozen=True)
class RayCopy:
    """The copy of a `RayLearner`; see `headrace_trainer.learner.Copy`."""

    ranks: Ranks
    number: int
    sizes: Mapping[str, int]
    fingerprint: Fingerprint | None

    def write(self, folder: Path) -> None:
        for name, size in self.sizes.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            with (folder / name).open("xb") as file:
                file.truncate(size)
        with marked(folder) as mark:
            written: list[list[Piece] | None] = self.ranks.beside("write_copy", self.number, str(folder), mark)
        pieces: list[Piece] = []
        for rank, own_pieces in enumerate(written):
            pieces += self._fetch_pieces(rank, folder) if own_pieces is None else own_pieces
        check(folder, self.sizes, pieces)

    def _fetch_pieces(self, rank: int, folder: Path) -> list[Piece]:
        """Fetch the pieces of a rank that cannot access the folder, one at a time, and write them here."""
        pieces: list[Piece] = self.ranks.one_beside(rank, "pieces", self.number)
        for piece in pieces:
            with (folder / piece.file).open("rb+") as file:
                file.seek(piece.start)
                file.write(self.ranks.one_beside(rank, "piece", self.number, piece))
        return pieces

    def drop(self) -> None:
        if self.ranks.failure is None:
            try:
                self.ranks.beside("drop", self.number)
            except LearnerLost:
                return  # the copy is lost with the learner
