"""Weights of a lineage in the blob store: immutable versions, and restore points that share a version's files.

The learner writes and reads the weights' files. This module adds the base's other files, a manifest and with it a name
to a version.

The weights file of a restore point and the files of the version that was made at the same time hold the same tensors
wherever the version has the type that is trained. In that case only the frame is stored besides the version: the
header of the file and the tensors that differ. The file is assembled again byte for byte, and checked against its
digest.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple

from headrace_runtime.errors import SettingError
from headrace_runtime.process import liveness
from headrace_runtime.storage import versions as store
from headrace_runtime.storage.base_models import FORMS
from headrace_runtime.storage.blobs import BlobStore
from headrace_runtime.storage.model_folder import find_irregular_files
from headrace_schemas.values.blobs import BlobRef, File, Fingerprint, Manifest
from headrace_trainer.learner import VERSION, WEIGHTS, Learner
from headrace_trainer.lineage.saved import Assembly, Range


def check_base(folder: Path) -> None:
    """Check that a folder has what the base model of a lineage needs.

    These are weights in safetensors, a `config.json` and a fast tokenizer, and no irregular files.

    Raises:
        SettingError: something is missing, or a file is irregular.
    """
    if not folder.is_dir():
        raise SettingError("trainer.base", str(folder), f"is not a folder; {FORMS}")
    for pattern, content in (("*.safetensors", "weights in safetensors"), ("config.json", "config.json")):
        if not any(folder.glob(pattern)):
            raise SettingError("trainer.base", str(folder), f"has no {content}; convert the model first")
    if not (folder / store.TOKENIZER_FILE).exists():
        raise SettingError("trainer.base", str(folder), f"has no {store.TOKENIZER_FILE}; save a fast tokenizer there")
    for problem in find_irregular_files(folder):
        raise SettingError("trainer.base", str(folder), problem)


@contextlib.contextmanager
def open_files(blobs: BlobStore, files: Iterable[File]) -> Iterator[Path]:
    """Open a context with a temporary folder that contains these files. Raises `CorruptBlob` or `Unavailable`."""
    with tempfile.TemporaryDirectory(prefix="headrace-version-") as name:
        yield store.fetch_files(blobs, files, Path(name))


def store_base_files(blobs: BlobStore, folder: Path) -> tuple[File, ...]:
    """Store the base's files of a new lineage in the blob store, and return their references. Blocks.

    Each file is read once, so later changes of the folder have no effect.
    """
    return store.store_files(blobs, folder)


def publish_base(
    blobs: BlobStore, files: tuple[File, ...], learner: Learner, *, name: str, lineage: str
) -> tuple[Manifest, BlobRef]:
    """Publish the base's own files, byte for byte, as the first version of a lineage. Blocks."""
    fingerprint = learner.fingerprint_of_base()
    tokenizer, template = store.prompt_digests(blobs, files)
    manifest = Manifest(
        name=name,
        lineage=lineage,
        step=0,
        files=files,
        fingerprint=fingerprint,
        tokenizer_sha256=tokenizer,
        template_sha256=template,
    )
    return store.store_manifest(blobs, manifest)


def publish_version(
    blobs: BlobStore,
    folder: Path,
    fingerprint: Fingerprint,
    *,
    first: Manifest,
    lineage: str,
    step: int,
    parent: str,
    kind: Literal["full", "lora"],
) -> tuple[Manifest, BlobRef]:
    """Publish the files that `Copy.write` wrote into `folder` as a new version. Blocks.

    The version is a whole model, or an adapter on the lineage's first version. Everything but the weights
    (configuration, tokenizer, templates) comes from the first version in the store. The folder is empty afterwards.
    """
    files = store.store_files(blobs, folder, move=True)
    if kind == "full":
        other_files = (file for file in first.files if not store.is_weights(file.path))
        files = tuple(sorted((*files, *other_files), key=lambda file: file.path))
    manifest = Manifest(
        name=first.name,
        lineage=lineage,
        step=step,
        parent=parent,
        kind=kind,
        base=first.version if kind == "lora" else None,
        files=files,
        fingerprint=fingerprint,
        tokenizer_sha256=first.tokenizer_sha256,
        template_sha256=first.template_sha256,
    )
    return store.store_manifest(blobs, manifest)


def check_same_base(folder: Path, first: Manifest, lineage: str) -> None:
    """Raise `SettingError` when `folder` differs from the base that the lineage started from."""
    present = {path.relative_to(folder).as_posix(): store.file_digest(path) for path in store.model_files(folder)}
    original = {file.path: file.blob.sha256 for file in first.files}
    differing = sorted(name for name in present.keys() | original.keys() if present.get(name) != original.get(name))
    if differing:
        raise SettingError(
            "trainer.base",
            str(folder),
            f"{', '.join(differing)} differ from what lineage {lineage} started from; choose another trainer.lineage",
        )


def load_weights(blobs: BlobStore, manifest: Manifest, learner: Learner) -> None:
    """Load the weights of a version into `learner`. Blocks. Raise `CorruptBlob` or `Unavailable`."""
    with open_files(blobs, manifest.files) as folder:
        learner.load(folder)


def fetch_weights(blobs: BlobStore, manifest: Manifest, folder: Path) -> None:
    """Fetch the weights of a version into `folder`. Blocks. Raise `CorruptBlob` or `Unavailable`."""
    weights = (file for file in manifest.files if file.path.endswith(".safetensors"))
    store.fetch_files(blobs, weights, folder)


def weight_digests(manifest: Manifest) -> frozenset[str]:
    """Return the digests of a version's weights. Two versions of one lineage differ only by them."""
    return frozenset(file.blob.sha256 for file in manifest.files if file.path.endswith(".safetensors"))


_FRAME = "frame"
_PIECE_BYTES = 4 << 20
_SHARE_MIN = 0.5
"""Minimum share of a file that its version must hold; below it, the file is stored as a whole."""


class _Tensor(NamedTuple):
    name: str
    type: str
    start: int
    """Offset in the file, its header included."""
    size: int


@dataclass(frozen=True, slots=True)
class SharedWeights:
    """Recipe for a weights file of a snapshot whose bytes are partly in a version's files already, so that they are
    stored once.
    """

    frame: Path
    """A file next to the weights, with the bytes that no version file has."""
    files: tuple[str, ...]
    """Paths of the version's files within the version."""
    ranges: tuple[Range, ...]

    def assembly(self, files: Sequence[File], frame: BlobRef) -> Assembly:
        """Return the description by which the weights file is assembled from stored blobs.

        Args:
            files: the files of the stored version that contain the shared bytes.
            frame: the blob with the bytes that no version file contains.
        """
        blobs = {file.path: file.blob for file in files}
        return Assembly(frame=frame, files=tuple(blobs[path] for path in self.files), ranges=self.ranges)


def share_weights(folder: Path) -> SharedWeights | None:
    """Split the weights file of a restore point into bytes that the version's files contain and the rest.

    The rest, the frame, is written into `folder`; the shared bytes need not be stored again. The version's files, which
    are in `folder` too, are compared byte by byte and not changed.

    Returns:
        The split, or None if the version contains less than half of the file, or if the back end uses another layout.
    """
    weights, version = folder / WEIGHTS, folder / VERSION
    paths = sorted(version.glob("*.safetensors")) if version.is_dir() else []
    if not paths:
        return None
    try:
        parts = [_header(weights), *_tensors(weights)]
        tensors = [(number, tensor) for number, path in enumerate(paths) for tensor in _tensors(path)]
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    version_tensors = {(tensor.name, tensor.type, tensor.size): (number, tensor) for number, tensor in tensors}
    ranges: list[Range] = []
    framed = 0
    frame = folder / _FRAME
    with weights.open("rb") as file, frame.open("wb") as frame_file:
        handles = [path.open("rb") for path in paths]
        try:
            for tensor in parts:
                number, source = version_tensors.get((tensor.name, tensor.type, tensor.size), (0, tensor))
                if source is not tensor and _is_same_data(file, tensor, handles[number], source):
                    _append(ranges, Range(number + 1, source.start, tensor.size))
                    continue
                _append(ranges, Range(0, framed, tensor.size))
                framed += tensor.size
                for piece in _pieces(file, tensor.start, tensor.size):
                    frame_file.write(piece)
        finally:
            for handle in handles:
                handle.close()
    if framed > (1 - _SHARE_MIN) * weights.stat().st_size:
        frame.unlink()
        return None
    return SharedWeights(frame, tuple(path.relative_to(version).as_posix() for path in paths), tuple(ranges))


def assemble(sources: Sequence[Path], ranges: Sequence[Range], target: Path) -> None:
    """Write a file that consists of `ranges` of `sources`. The first of the sources is the frame."""
    handles = [path.open("rb") for path in sources]
    try:
        with target.open("wb") as file:
            for source, start, size in ranges:
                for piece in _pieces(handles[source], start, size):
                    file.write(piece)
    finally:
        for handle in handles:
            handle.close()


def _header(path: Path) -> _Tensor:
    with path.open("rb") as file:
        size = 8 + int.from_bytes(file.read(8), "little")
    if size > path.stat().st_size:
        raise ValueError(f"{path}: is no safetensors file")
    return _Tensor("", "header", 0, size)


def _tensors(path: Path) -> list[_Tensor]:
    """Return the tensors of a safetensors file in the order of their bytes, which fill the file after its header."""
    data = _header(path).size
    with path.open("rb") as file:
        file.seek(8)
        entries = json.loads(file.read(data - 8))
    tensors = [
        _Tensor(name, f"{entry['dtype']} {entry['shape']}", data + entry["data_offsets"][0],
                entry["data_offsets"][1] - entry["data_offsets"][0])
        for name, entry in entries.items() if name != "__metadata__"
    ]  # fmt: skip
    return sorted(tensors, key=lambda tensor: (tensor.start, tensor.size))


def _is_same_data(file: BinaryIO, tensor: _Tensor, other: BinaryIO, source: _Tensor) -> bool:
    pairs = zip(_pieces(file, tensor.start, tensor.size), _pieces(other, source.start, source.size), strict=True)
    return all(left == right for left, right in pairs)


def _append(ranges: list[Range], following: Range) -> None:
    """Append a range, or extend the last one if `following` continues it."""
    if ranges and ranges[-1].source == following.source and ranges[-1].start + ranges[-1].size == following.start:
        ranges[-1] = ranges[-1]._replace(size=ranges[-1].size + following.size)
    elif following.size:
        ranges.append(following)


def _pieces(file: BinaryIO, start: int, size: int) -> Iterator[bytes]:
    file.seek(start)
    for at in range(0, size, _PIECE_BYTES):
        piece = file.read(min(_PIECE_BYTES, size - at))
        if not piece:
            raise EOFError(f"{file.name}: ends before byte {start + size}")
        liveness.progress()
        yield piece
