"""How a file that ranks have written together is known to be whole. Light: no torch, no ray."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace_trainer.learner import LearnerLost

MARK = ".headrace-mark"
"""The file by which a rank knows the trainer's folder."""
PIECE_BYTES = 32 << 20
"""Of a file that goes to or comes from a rank, or is written at once."""


@dataclass(frozen=True, order=True)
class Piece:
    """What a rank has written, or has to be written for it: a range of a file, and a checksum of what is in it."""

    file: str
    start: int
    size: int
    crc32: int

    @classmethod
    def of(cls, file: str, start: int, content: bytes | memoryview) -> Piece:
        return cls(file, start, len(content), zlib.crc32(content))


def check(folder: Path, sizes: Mapping[str, int], pieces: Sequence[Piece]) -> None:
    """Read what is in the files, in pieces. Raises `LearnerLost` when pieces are missing or overlap, or when a file
    holds something else than was said: a rank that died in the middle, another copy's pieces, a folder that is not
    shared as it seems."""
    ends = dict.fromkeys(sizes, 0)
    for piece in sorted(pieces):
        if piece.file not in ends or piece.start != ends[piece.file]:
            raise _broken(piece.file, f"{piece.start} is written where {ends.get(piece.file)} comes next")
        ends[piece.file] += piece.size
    for name, size in sizes.items():
        if ends[name] != size or (folder / name).stat().st_size != size:
            raise _broken(name, f"{ends[name]} of {size} bytes are written")
    for piece in pieces:
        with (folder / piece.file).open("rb") as file:
            file.seek(piece.start)
            if zlib.crc32(file.read(piece.size)) != piece.crc32:
                raise _broken(piece.file, f"the {piece.size} bytes at {piece.start} are not those that a rank holds")


def _broken(name: str, why: str) -> LearnerLost:
    return LearnerLost(f"ranks have not written {name} whole: {why}; nothing of it is kept")
