"""A folder in the layout of Hugging Face, or an adapter in that of PEFT, as a version in the blob store. Blocks.

The fingerprint is what transformers' own attention answers. The loading code of a replica has to answer the same, else
the folder is refused: it would be refused by every replica, later and in front of users.
"""

from __future__ import annotations

import gc
import tempfile
from pathlib import Path

from headrace_inference.chat.tokenizer import ChatTokenizer
from headrace_inference.errors import VersionUnusable
from headrace_inference.importing import adapters, native
from headrace_inference.settings import InferenceSettings, TorchSettings
from headrace_inference.torch_engine.engine import device_and_type
from headrace_inference.torch_engine.loader import Loader
from headrace_inference.torch_engine.model import Model
from headrace_inference.torch_engine.probe import probe
from headrace_runtime import versions
from headrace_runtime.blobs import BlobStore
from headrace_runtime.errors import Refused
from headrace_runtime.model_folder import find_folder_problems
from headrace_schemas.importing import MANIFEST_FILE, FolderLine, StoredLine
from headrace_schemas.manifest import File, Fingerprint, Manifest

_LINEAGE = "registered"
_DUMMY = Fingerprint(token_ids=(0, 0), logprobs=(0.0,))
_HELLO = [{"role": "user", "content": "Hello"}]


class Importer:
    """`take` folders. Loads on the device and with the types of `[inference.torch]`."""

    def __init__(self, blobs: BlobStore, settings: InferenceSettings) -> None:
        self._blobs = blobs
        self._torch = TorchSettings.model_validate(settings.of("torch"))
        self._device, self._dtype = device_and_type(self._torch)
        self._loader = Loader(self._device, self._dtype, self._torch.context_tokens_max, trace=False)

    def take(self, line: FolderLine) -> StoredLine:
        """Raises `VersionUnusable`, `CorruptBlob` or `Unavailable`. Then nothing of it is a version."""
        folder = Path(line.folder)
        known = _exported(folder)
        if known is not None and line.name in (None, known.name):
            return self._as_exported(folder, known)
        if line.name is None:
            raise VersionUnusable(f"{folder} has no {MANIFEST_FILE} of an export; name the model that it shall be")
        made = self._adapter(folder, line) if adapters.is_adapter(folder) else self._full(folder, line.name)
        return self._store(folder, made)

    def _full(self, folder: Path, name: str) -> Manifest:
        _check_files(folder)
        draft = Manifest(
            name=name,
            lineage=_LINEAGE,
            step=0,
            files=_files(self._blobs, folder),
            fingerprint=_DUMMY,
            tokenizer_sha256=versions.file_digest(folder / versions.TOKENIZER_FILE),
            template_sha256=versions.template_digest(folder),
        )
        tokenizer = ChatTokenizer(folder, draft)
        manifest = _with(draft, native.answers(folder, None, self._device, self._dtype))
        model = self._loader.load(folder, manifest, None, None)
        _check_tokenizer(tokenizer, model, folder)
        self._check_answers(model, manifest)
        return manifest

    def _adapter(self, folder: Path, line: FolderLine) -> Manifest:
        assert line.name is not None
        if line.base is None:
            raise VersionUnusable(f"{folder} is an adapter: name the version that it applies to (--base)")
        with tempfile.TemporaryDirectory(prefix="headrace-base-") as name:
            base_manifest = versions.read_manifest(self._blobs, line.base)
            base = versions.unpack(self._blobs, base_manifest, Path(name))
            adapters.check(folder, base, base_manifest)
            draft = Manifest(
                name=line.name,
                lineage=_LINEAGE,
                step=0,
                kind="lora",
                base=base_manifest.version,
                files=_files(self._blobs, folder),
                fingerprint=_DUMMY,
                tokenizer_sha256=base_manifest.tokenizer_sha256,
                template_sha256=base_manifest.template_sha256,
            )
            manifest = _with(draft, native.answers(base, folder, self._device, self._dtype))
            below = self._loader.load(base, base_manifest, None, None)
            model = self._loader.load(folder, manifest, below, base)
            self._check_answers(model, manifest)
            if probe(model, below, self._torch.probe_tolerance).parent_max_abs_delta == 0:
                raise VersionUnusable(f"{folder}: the adapter changes nothing of what {base_manifest.version} answers")
        return manifest

    def _as_exported(self, folder: Path, manifest: Manifest) -> StoredLine:
        """The very version that was exported, if every file still hashes to its name."""
        for file in manifest.files:
            path = folder / file.path
            if not path.is_file():
                raise VersionUnusable(f"{manifest.version}: {file.path} is missing in {folder}")
            if versions.file_digest(path) != file.blob.sha256:
                raise VersionUnusable(f"{manifest.version}: {file.path} is not the file that was exported")
        for file in manifest.files:
            self._blobs.put((folder / file.path).read_bytes())
        _, ref = versions.store_manifest(self._blobs, manifest)
        return StoredLine(version=manifest.version, manifest=ref)

    def _check_answers(self, model: Model, manifest: Manifest) -> None:
        found = probe(model, None, self._torch.probe_tolerance)
        if not found.passed:
            raise VersionUnusable(
                f"{manifest.version}: our engine answers otherwise than transformers' own attention, by "
                f"{found.max_abs_delta:.3g} nats; inference.torch.probe_tolerance is {self._torch.probe_tolerance:g}"
            )

    def _store(self, folder: Path, manifest: Manifest) -> StoredLine:
        gc.collect()
        stored = tuple(one for one in versions.store_files(self._blobs, folder) if one.path != MANIFEST_FILE)
        if [one.blob.sha256 for one in stored] != [one.blob.sha256 for one in manifest.files]:
            raise VersionUnusable(f"{folder} was changed while it was read; try again")
        _, ref = versions.store_manifest(self._blobs, manifest)
        return StoredLine(version=manifest.version, manifest=ref)


def _exported(folder: Path) -> Manifest | None:
    path = folder / MANIFEST_FILE
    if not path.exists():
        return None
    try:
        return Manifest.model_validate_json(path.read_bytes(), extra="ignore")
    except ValueError as error:
        raise VersionUnusable(f"{path} is no manifest: {error}") from None


def _check_files(folder: Path) -> None:
    if not folder.is_dir():
        raise VersionUnusable(f"{folder} is not a folder")
    for pattern, what in (
        ("*.safetensors", "weights in safetensors"),
        ("config.json", "config.json"),
        (versions.TOKENIZER_FILE, f"{versions.TOKENIZER_FILE}: save a fast tokenizer there"),
    ):
        if not any(folder.glob(pattern)):
            raise VersionUnusable(f"{folder} has no {what}")
    problem = next(find_folder_problems(folder), None)
    if problem is not None:
        raise VersionUnusable(f"{folder}: {problem}")


def _files(blobs: BlobStore, folder: Path) -> tuple[File, ...]:
    """What will be stored, by digest; nothing is stored yet."""
    paths = [path for path in versions.model_files(folder) if path.name != MANIFEST_FILE]
    return tuple(File(path=p.relative_to(folder).as_posix(), blob=blobs.ref(p.read_bytes())) for p in paths)


def _with(draft: Manifest, fingerprint: Fingerprint) -> Manifest:
    return draft.model_copy(update={"fingerprint": fingerprint})


def _check_tokenizer(tokenizer: ChatTokenizer, model: Model, folder: Path) -> None:
    """Raises `VersionUnusable` when it is not this model's, as far as that can be told."""
    last = tokenizer.last_id
    if last >= model.vocabulary:
        raise VersionUnusable(
            f"{folder}: its tokenizer has token {last}, the model only {model.vocabulary}: it is another model's"
        )
    try:
        tokenizer.encode(tokenizer.render(_HELLO, None, {}))
    except Refused as error:
        raise VersionUnusable(f"{folder}: {error}") from None
