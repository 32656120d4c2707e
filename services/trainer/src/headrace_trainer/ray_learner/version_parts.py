"""The ranges that a rank writes of the files of a snapshot and of a version. Together the ranks write the same
files as a single process.

The first rank finds out which tensor is in which file, under which name, by calling the library with tensors without
values.

A sharded tensor is divided by rows, so a rank's part of it is one range of the file. Tensors that every rank holds as
a whole are written by the first rank.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from headrace_schemas.values.blobs import Fingerprint
from headrace_trainer.learner import VERSION
from headrace_trainer.ray_learner.pieces import PIECE_BYTES, Piece
from headrace_trainer.torch_learner import version_files
from headrace_trainer.torch_learner.learner import TorchLearner
from headrace_trainer.torch_learner.model.masters import round_stochastically
from headrace_trainer.torch_learner.model.policy import Policy
from headrace_trainer.torch_learner.stored_tensors import is_sharded, layout
from headrace_trainer.torch_learner.version_files import WritePlan


@dataclass(frozen=True)
class OwnPart:
    """Part of a tensor that this rank holds."""

    values: Tensor
    """A reference to the values, on the tensor's device."""
    start: int
    """Index of the first value in the whole tensor."""


@dataclass(frozen=True)
class FileRange:
    """Bytes of a file that this rank writes."""

    file: str
    start: int
    content: memoryview

    def pieces(self) -> Iterator[tuple[Piece, memoryview]]:
        for at in range(0, len(self.content), PIECE_BYTES):
            content = self.content[at : at + PIECE_BYTES]
            yield Piece.of(self.file, self.start + at, content), content


def own_part(tensor: Tensor, *, first: bool) -> OwnPart | None:
    """Return this rank's part of a tensor, or None if it has none.

    All ranks must call it together, because a tensor that is not divided by rows is gathered in each.

    Args:
        tensor: the tensor.
        first: whether this is the first rank, which writes unsharded tensors.
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


def compute_ranges(
    file: str,
    tensors: Mapping[str, Tensor],
    own_parts: Mapping[str, OwnPart | None],
    about: Mapping[str, str],
    *,
    first: bool,
) -> tuple[int, list[FileRange]]:
    """Return the size of a file in bytes, and copies of this rank's ranges of it in host memory.

    Args:
        file: path of the file.
        tensors: all tensors of the file, for their shapes and types.
        own_parts: this rank's part of each tensor.
        about: metadata of the file.
        first: whether this is the first rank, which writes the header.
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


def write(folder: Path, ranges: Sequence[FileRange]) -> list[Piece]:
    """Write ranges into files in `folder`, which exist with their final size. Return the written pieces."""
    pieces = []
    for file_range in ranges:
        with (folder / file_range.file).open("rb+") as file:
            for piece, content in file_range.pieces():
                file.seek(piece.start)
                file.write(content)
                pieces.append(piece)
    return pieces


@dataclass(frozen=True)
class VersionPart:
    """Part of a version's files that one rank writes."""

    fingerprint: Fingerprint | None = None
    ranges: tuple[FileRange, ...] = ()
    sizes: Mapping[str, int] | None = None
    """Sizes of all files. Only the first rank reports them, as well as the fingerprint."""


@dataclass(frozen=True)
class _Entry:
    """Tensor of a version's file. `name` is its name in the model, or None for a tensor that only the first rank
    has."""

    name: str | None
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def meta_tensor(self) -> Tensor:
        """Tensor of this shape and type on the device `meta`, which takes no memory."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


_Files = Mapping[str, Mapping[str, _Entry]]


def version_of(inner: TorchLearner, base: str, *, first: bool, sharded: bool) -> VersionPart:
    """Compute this rank's part of a version. Called in all ranks at once.

    Args:
        inner: the rank's learner.
        base: the lineage's first version.
        first: whether this is the first rank.
        sharded: whether every rank holds a shard; otherwise the first rank holds all weights.
    """
    if not (first or sharded):
        return VersionPart()
    if inner.policy.lora:
        return _adapter(inner.policy, base, first=first)
    policy, dtype = inner.policy, inner.served_as
    own_parts = {name: own_part(parameter, first=first) for name, parameter in policy.parameters.items()}
    rounded = {name: _round_part(part, dtype, name) for name, part in own_parts.items() if part is not None}
    fingerprint = policy.fingerprint({name: part.values for name, part in rounded.items()})
    bare = {name: torch.empty(p.shape, dtype=dtype, device="meta") for name, p in policy.parameters.items()}
    plan = version_files.plan_files(policy, bare) if first else None
    files = _broadcast(None if plan is None else _entries(plan, bare), sharded=sharded)
    if files is None:
        # The files hold tensors in another form than the model does, for example experts that are one tensor in the
        # model.
        trained = policy.tensors()
        if first:
            weights = {name: round_stochastically(tensor, dtype, name) for name, tensor in trained.items()}
            plan = version_files.plan_files(policy, weights)
            files = _entries(plan, {})
    if files is None:
        return VersionPart()
    file_ranges: list[FileRange] = []
    sizes: dict[str, int] = {}
    for file, entries in files.items():
        own_tensors = {
            name: rounded.get(entry.name)
            if entry.name is not None
            else own_part(plan.files[file][name], first=first)
            if plan is not None
            else None
            for name, entry in entries.items()
        }
        name = f"{VERSION}/{file}"
        tensors = {name: entry.meta_tensor for name, entry in entries.items()}
        sizes[name], other_ranges = compute_ranges(name, tensors, own_tensors, version_files.ABOUT, first=first)
        file_ranges += other_ranges
    texts = _texts(plan.texts) if plan is not None else ()
    return VersionPart(fingerprint, (*file_ranges, *texts), sizes | {text.file: len(text.content) for text in texts})


def _entries(plan: WritePlan, bare: Mapping[str, Tensor]) -> _Files | None:
    """Return for each file of a version its tensors, with the model's tensor that each equals, its shape and type.

    The result is None if the library stores a tensor in a form that equals no tensor of the model.
    """
    names = {id(tensor): name for name, tensor in bare.items()}
    if not plan.is_exact(names):
        return None
    return {
        file: {
            name: _Entry(names.get(id(tensor)), tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()
        }
        for file, tensors in plan.files.items()
    }


def _broadcast(files: _Files | None, *, sharded: bool) -> _Files | None:
    """Send the first rank's plan of the files to all ranks, if the weights are sharded."""
    if not sharded:
        return files
    broadcast: list[_Files | None] = [files]
    dist.broadcast_object_list(broadcast, src=0)
    return broadcast[0]


def _round_part(part: OwnPart, dtype: torch.dtype, name: str) -> OwnPart:
    return OwnPart(round_stochastically(part.values, dtype, name, start=part.start), part.start)


def _texts(texts: Mapping[str, bytes]) -> tuple[FileRange, ...]:
    return tuple(FileRange(f"{VERSION}/{name}", 0, memoryview(content)) for name, content in texts.items())


def _adapter(policy: Policy, base: str, *, first: bool) -> VersionPart:
    """Return this rank's part of an adapter's files. An adapter is small, so the first rank gathers and writes it."""
    trained, fingerprint = policy.tensors(), policy.fingerprint()
    if not first:
        return VersionPart(fingerprint)
    with tempfile.TemporaryDirectory(prefix="headrace-adapter-") as folder:
        version_files.save_adapter(policy, Path(folder), base, trained)
        texts = _texts({path.name: path.read_bytes() for path in sorted(Path(folder).iterdir()) if path.is_file()})
    return VersionPart(fingerprint, texts, {text.file: len(text.content) for text in texts})
