"""What a rank adds to the files of a copy: ranges of the very files that one process would write.

A tensor that is in parts is cut by rows, so a rank's part of it is one range of the file. What every rank has whole is
the first one's.
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
    """References, and where the tensor is."""
    start: int
    """Of the first of them in the whole tensor."""


@dataclass(frozen=True)
class FileRange:
    """Bytes that this rank holds of a file."""

    file: str
    start: int
    content: memoryview

    def pieces(self) -> Iterator[tuple[Piece, memoryview]]:
        for at in range(0, len(self.content), PIECE_BYTES):
            content = self.content[at : at + PIECE_BYTES]
            yield Piece.of(self.file, self.start + at, content), content


def own(tensor: Tensor, *, first: bool) -> OwnPart | None:
    """`first`: whether this is the rank that speaks for all. Where a tensor is cut in another way than by rows, all
    ranks ask at once, and it comes together in each."""
    if not is_sharded(tensor):
        return OwnPart(tensor.detach(), 0) if first else None
    from torch.distributed.tensor import Shard  # seconds that one process need not wait

    held: Any = tensor.detach()
    if tuple(held.placements) != (Shard(0),):
        whole: Tensor = held.full_tensor()
        return OwnPart(whole, 0) if first else None
    local: Tensor = held.to_local()
    rows, ranks = held.shape[0], held.device_mesh.size()
    each = -(-rows // ranks)
    start = min(held.device_mesh.get_rank() * each, rows)
    assert len(local) == min(each, rows - start), "FSDP2 cuts by rows, as torch.chunk does"
    return OwnPart(local, start * (held.numel() // rows if rows else 0))


def ranges(
    file: str,
    tensors: Mapping[str, Tensor],
    held: Mapping[str, OwnPart | None],
    about: Mapping[str, str],
    *,
    first: bool,
) -> tuple[int, list[FileRange]]:
    """The file's size, and copies in the host's memory of what is ours in it. `tensors` say shapes and types."""
    plan = layout(tensors, about)
    found = [FileRange(file, 0, memoryview(plan.header))] if first else []
    for name in tensors:
        part = held[name]
        if part is not None and part.values.numel():
            start = plan.starts[name] + part.start * tensors[name].element_size()
            found.append(FileRange(file, start, content_of(part.values)))
    return plan.size, found


def content_of(values: Tensor) -> memoryview:
    """A copy in the host's memory."""
    copied = values.detach().to("cpu", copy=True).contiguous().reshape(-1).view(torch.uint8)
    found: Any = copied.numpy()
    return memoryview(found)


def write(folder: Path, mine: Sequence[FileRange]) -> list[Piece]:
    """Into files that are there and as long as they will be. Returns what was written."""
    found = []
    for one in mine:
        with (folder / one.file).open("rb+") as file:
            for piece, content in one.pieces():
                file.seek(piece.start)
                file.write(content)
                found.append(piece)
    return found
