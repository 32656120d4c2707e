"""Checks that files which ranks have written together are complete, without torch and ray."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace_trainer.learner import LearnerLost

MARK = ".headrace-mark"
"""The file by which a rank recognises the trainer's folder."""
PIECE_BYTES = 32 << 20
"""Size of a piece of a file that is sent to or from a rank, or written at once."""


@dataclass(frozen=True, order=True)
class Piece:
    """A range of a file that a rank has written, with the checksum of its content."""

    file: str
    start: int
    size: int
    crc32: int

    @classmethod
    def of(cls, file: str, start: int, content: bytes | memoryview) -> Piece:
        return cls(file, start, len(content), zlib.crc32(content))


def check(folder: Path, sizes: Mapping[str, int], pieces: Sequence[Piece]) -> None:
    """Check files that several ranks have written together, piece by piece, by the checksums that the ranks reported.

    Args:
        folder: folder with the files.
        sizes: size of each file in bytes.
        pieces: all pieces that the ranks reported.

    Raises:
        LearnerLost: pieces are missing or overlap, or a file has another content than reported: a rank died during the
            copy, wrote another copy's pieces, or does not share the folder.
    """
    ends = dict.fromkeys(sizes, 0)
    for piece in sorted(pieces):
        if piece.file not in ends or piece.start != ends[piece.file]:
            raise _incomplete(piece.file, f"{piece.start} is written where {ends.get(piece.file)} comes next")
        ends[piece.file] += piece.size
    for name, size in sizes.items():
        if ends[name] != size or (folder / name).stat().st_size != size:
            raise _incomplete(name, f"{ends[name]} of {size} bytes are written")
    for piece in pieces:
        with (folder / piece.file).open("rb") as file:
            file.seek(piece.start)
            if zlib.crc32(file.read(piece.size)) != piece.crc32:
                raise _incomplete(
                    piece.file, f"the {piece.size} bytes at {piece.start} are not those that a rank holds"
                )


def _incomplete(name: str, why: str) -> LearnerLost:
    return LearnerLost(f"ranks have not written {name} completely: {why}; the copy is discarded")
