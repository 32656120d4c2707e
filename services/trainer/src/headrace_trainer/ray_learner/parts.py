"""The ranges of a copy's files that a rank writes. Together the ranks write the same files as a single process would.

A sharded tensor is divided by rows, so a rank's part of it is one range of the file. Tensors that every rank holds as
a whole are written by the first rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headrace_trainer.ray_learner.pieces import PIECE_BYTES, Piece
from headrace_trainer.torch_learner.layout import layout
from headrace_trainer.torch_learner.shards import is_sharded


@dataclass(frozen=True)
class OwnPart:
    """This rank's part of a tensor."""

    values: Tensor
    """A reference to the values, on the tensor's device."""
    start: int
    """Index of the first value in the whole tensor."""


@dataclass(frozen=True)
class FileRange:
    """Bytes of a file that this rank holds."""

    file: str
    start: int
    content: memoryview

    def pieces(self) -> Iterator[tuple[Piece, memoryview]]:
        for at in range(0, len(self.content), PIECE_BYTES):
            content = self.content[at : at + PIECE_BYTES]
            yield Piece.of(self.file, self.start + at, content), content


def own_part(tensor: Tensor, *, first: bool) -> OwnPart | None:
    """Return this rank's part of a tensor. `first`: whether this is the first rank, which writes unsharded tensors.

    All ranks must call it at once, because a tensor that is not divided by rows is gathered in each.
    """
    if not is_sharded(tensor):
        return OwnPart(tensor.detach(), 0) if first else None
    from torch.distributed.tensor import Shard  # imported here, because it takes seconds

    dtensor: Any = tensor.detach()
    if tuple(dtensor.placements) != (Shard(0),):
        full: Tensor = dtensor.full_tensor()
        return OwnPart(full, 0) if first else None
    local: Tensor = dtensor.to_local()
    rows, ranks = dtensor.shape[0], dtensor.device_mesh.size()
    each = -(-rows // ranks)
    start = min(dtensor.device_mesh.get_rank() * each, rows)
    assert len(local) == min(each, rows - start), "FSDP2 divides by rows, as torch.chunk does"
    return OwnPart(local, start * (dtensor.numel() // rows if rows else 0))


def ranges(
    file: str,
    tensors: Mapping[str, Tensor],
    own_parts: Mapping[str, OwnPart | None],
    about: Mapping[str, str],
    *,
    first: bool,
) -> tuple[int, list[FileRange]]:
    """Return the file's size, and copies of this rank's ranges in host memory.

    Args:
        file: The path of the file.
        tensors: All tensors of the file, for their shapes and types.
        own_parts: This rank's part of each tensor.
        about: The file's metadata.
        first: Whether this is the first rank, which writes the header.
    """
    plan = layout(tensors, about)
    file_ranges = [FileRange(file, 0, memoryview(plan.header))] if first else []
    for name in tensors:
        part = own_parts[name]
        if part is not None and part.values.numel():
            start = plan.starts[name] + part.start * tensors[name].element_size()
            file_ranges.append(FileRange(file, start, content_of(part.values)))
    return plan.size, file_ranges


def content_of(values: Tensor) -> memoryview:
    """Return the bytes of the values, copied to host memory."""
    copied = values.detach().to("cpu", copy=True).contiguous().reshape(-1).view(torch.uint8)
    array: Any = copied.numpy()
    return memoryview(array)


def write(folder: Path, mine: Sequence[FileRange]) -> list[Piece]:
    """Write ranges into existing files of their final size. Return the written pieces."""
    pieces = []
    for file_range in mine:
        with (folder / file_range.file).open("rb+") as file:
            for piece, content in file_range.pieces():
                file.seek(piece.start)
                file.write(content)
                pieces.append(piece)
    return pieces
