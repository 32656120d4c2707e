"""`python -m headrace_inference.importer`: imports models as versions and merges adapters. Blocks.

It reads lines `folder` or `merge` and writes lines `stored` or `merged`. A folder has the layout of Hugging Face, an
adapter that of PEFT. The fingerprint is computed with transformers' own attention. If the loading code of a replica
computes other logprobs, the folder is refused, because every replica would refuse the version later.
"""

from __future__ import annotations

import gc
import json
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from headrace_inference.chat.tokenizer import ChatTokenizer
from headrace_inference.errors import VersionUnusable
from headrace_inference.settings import InferenceSettings, TorchSettings
from headrace_inference.torch_engine.engine import device_and_type
from headrace_inference.torch_engine.loader import Loader, Model, check_weights
from headrace_inference.torch_engine.probe import probe, tolerance_of
from headrace_runtime.errors import Refused
from headrace_runtime.main import Service
from headrace_runtime.process.programs import Lines
from headrace_runtime.settings.sections import Common
from headrace_runtime.storage import versions
from headrace_runtime.storage.blobs import BlobStore
from headrace_runtime.storage.model_folder import find_folder_problems, find_irregular_files
from headrace_runtime.storage.versions import fingerprint_tokens
from headrace_schemas.programs import MANIFEST_FILE, FolderLine, MergedLine, MergeLine, StoredLine
from headrace_schemas.values.blobs import BlobRef, File, Fingerprint, Manifest
from headrace_schemas.values.text import read_user_text

ADAPTER_CONFIG = "adapter_config.json"
_VERSION = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}@[0-9a-f]{12,64}$")


def is_adapter(folder: Path) -> bool:
    """Return whether the folder contains an adapter."""
    return (folder / ADAPTER_CONFIG).exists()


def check_adapter(folder: Path, base: Path, manifest: Manifest) -> None:
    """Raise `VersionUnusable` if the adapter names another base, or contains another tokenizer or chat template.

    Args:
        base: folder of the base.
        manifest: manifest of the base.
    """
    try:
        config = json.loads(read_user_text(folder / ADAPTER_CONFIG))
        base_name = str(config.get("base_model_name_or_path") or "")
    except (ValueError, AttributeError, RecursionError) as error:
        raise VersionUnusable(f"{folder / ADAPTER_CONFIG} cannot be read: {error}") from None
    if manifest.kind != "full":
        raise VersionUnusable(f"{manifest.version} is an adapter itself; name the version that it applies to")
    if _VERSION.match(base_name) and base_name != manifest.version:
        raise VersionUnusable(f"{folder} is an adapter of {base_name}, not of {manifest.version}")
    tokenizer = folder / versions.TOKENIZER_FILE
    if tokenizer.exists() and versions.file_digest(tokenizer) != manifest.tokenizer_sha256:
        raise VersionUnusable(f"{folder}: its {versions.TOKENIZER_FILE} is not that of its base {manifest.version}")
    if _has_templates(folder) and versions.template_digest(folder) != versions.template_digest(base):
        raise VersionUnusable(f"{folder}: its chat template is not that of its base {manifest.version}")


def _has_templates(folder: Path) -> bool:
    return any(folder.glob("*.jinja")) or "chat_template" in _text(folder / "tokenizer_config.json")


def _text(path: Path) -> str:
    return read_user_text(path) if path.exists() else ""


_LINEAGE = "registered"
_DUMMY = Fingerprint(token_ids=(0, 0), logprobs=(0.0,))
_HELLO = [{"role": "user", "content": "Hello"}]


class Importer:
    """Importer of folders as versions. It loads weights onto the device and in the type of `[inference.torch]`."""

    def __init__(self, blobs: BlobStore, settings: InferenceSettings) -> None:
        self._blobs = blobs
        self._torch = TorchSettings.model_validate(settings.of("torch"))
        self._device, dtype = device_and_type(self._torch)
        self._loader = Loader(self._device, dtype, self._torch.context_tokens_max, trace=False)

    def import_folder(self, line: FolderLine) -> StoredLine:
        """Store a folder as a version.

        Raises:
            VersionUnusable: a replica would refuse the version. No version is stored.
            CorruptBlob, Unavailable: the blob store failed. No version is stored.
        """
        folder = Path(line.folder)
        exported = _exported(folder)
        if exported is not None and line.name in (None, exported.name):
            return self._as_exported(folder, exported)
        if line.name is None:
            raise VersionUnusable(f"{folder} has no {MANIFEST_FILE} of an export; give the model a name")
        manifest = self._adapter(folder, line) if is_adapter(folder) else self._full(folder, line.name)
        return self._store(folder, manifest)

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
        manifest = _with_fingerprint(draft, fingerprint_of(folder, None, self._device, self._loader.dtype_of(draft)))
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
            base = versions.fetch_version(self._blobs, base_manifest, Path(name))
            check_adapter(folder, base, base_manifest)
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
            dtype = self._loader.dtype_of(base_manifest)
            fingerprint = fingerprint_of(base, folder, self._device, dtype)
            manifest = _with_fingerprint(
                draft, fingerprint.model_copy(update={"dtype": base_manifest.fingerprint.dtype})
            )
            base_model = self._loader.load(base, base_manifest, None, None)
            model = self._loader.load(folder, manifest, base_model, base)
            self._check_answers(model, manifest)
            if probe(model, base_model, self._torch.probe_tolerance).parent_max_abs_delta == 0:
                raise VersionUnusable(f"{folder}: the adapter does not change the logprobs of {base_manifest.version}")
        return manifest

    def _as_exported(self, folder: Path, manifest: Manifest) -> StoredLine:
        """Store the version that Headrace exported to this folder, under its own manifest.

        Raises:
            VersionUnusable: a file was changed after the export.
        """
        for file in manifest.files:
            path = folder / file.path
            if not path.is_file():
                raise VersionUnusable(f"{manifest.version}: {file.path} is missing in {folder}")
            if versions.file_digest(path) != file.blob.sha256:
                raise VersionUnusable(f"{manifest.version}: {file.path} is not the file that was exported")
        for file in manifest.files:
            if self._blobs.put_file(folder / file.path).sha256 != file.blob.sha256:
                raise VersionUnusable(f"{folder} was changed while it was read; try again")
        _, ref = versions.store_manifest(self._blobs, manifest)
        return StoredLine(version=manifest.version, manifest=ref)

    def _check_answers(self, model: Model, manifest: Manifest) -> None:
        result = probe(model, None, self._torch.probe_tolerance)
        if not result.passed:
            tolerance = tolerance_of(model, self._torch.probe_tolerance)
            raise VersionUnusable(
                f"{manifest.version}: the logprobs of the engine differ from those of transformers' own attention by "
                f"{result.max_abs_delta:.3g} nats; the tolerance (inference.probe_tolerance) is {tolerance:.3g}"
            )

    def _store(self, folder: Path, manifest: Manifest) -> StoredLine:
        gc.collect()
        stored = tuple(file for file in versions.store_files(self._blobs, folder) if file.path != MANIFEST_FILE)
        if [file.blob.sha256 for file in stored] != [file.blob.sha256 for file in manifest.files]:
            raise VersionUnusable(f"{folder} was changed while it was read; try again")
        _, ref = versions.store_manifest(self._blobs, manifest)
        return StoredLine(version=manifest.version, manifest=ref)


def _exported(folder: Path) -> Manifest | None:
    """Return the manifest of a version that was exported to the folder; None without one."""
    path = folder / MANIFEST_FILE
    if not path.exists():
        return None
    try:
        return Manifest.model_validate_json(path.read_bytes(), extra="ignore")
    except ValueError as error:
        raise VersionUnusable(f"{path} is not a manifest: {error}") from None


def _check_files(folder: Path) -> None:
    if not folder.is_dir():
        raise VersionUnusable(f"{folder} is not a folder")
    for pattern, description in (
        ("*.safetensors", "weights in safetensors"),
        ("config.json", "config.json"),
        (versions.TOKENIZER_FILE, f"{versions.TOKENIZER_FILE}: save a fast tokenizer there"),
    ):
        if not any(folder.glob(pattern)):
            raise VersionUnusable(f"{folder} has no {description}")
    problem = next(find_folder_problems(folder), None)
    if problem is not None:
        raise VersionUnusable(f"{folder}: {problem}")


def _files(blobs: BlobStore, folder: Path) -> tuple[File, ...]:
    """Return references with digests to the files of `folder`, before they are stored. Raises `VersionUnusable`."""
    for problem in find_irregular_files(folder):
        raise VersionUnusable(f"{folder}: {problem}")
    paths = [path for path in versions.model_files(folder) if path.name != MANIFEST_FILE]
    return tuple(File(path=p.relative_to(folder).as_posix(), blob=blobs.file_ref(p)) for p in paths)


def _with_fingerprint(draft: Manifest, fingerprint: Fingerprint) -> Manifest:
    return draft.model_copy(update={"fingerprint": fingerprint})


def _check_tokenizer(tokenizer: ChatTokenizer, model: Model, folder: Path) -> None:
    """Check that the tokenizer's chat template renders a message and that all token ids are in the model's vocabulary.

    Raises:
        VersionUnusable: the template fails, or a token id exceeds the vocabulary.
    """
    last = tokenizer.last_id
    if last >= model.vocabulary:
        raise VersionUnusable(
            f"{folder}: its tokenizer has token {last}, the model has only {model.vocabulary} tokens; the tokenizer "
            "belongs to another model"
        )
    try:
        tokenizer.encode(tokenizer.render(_HELLO, None, {}))
    except Refused as error:
        raise VersionUnusable(f"{folder}: {error}") from None


def fingerprint_of(folder: Path, adapter: Path | None, device: torch.device, dtype: torch.dtype | None) -> Fingerprint:
    """Load the model in `folder`, with the adapter if there is one, and return the fingerprint of its weights.

    Raises:
        VersionUnusable: the weights cannot be loaded, or their logprobs are not finite.
    """
    try:
        model = load_model(folder, adapter, dtype).to(device).eval()
        vocabulary = int(AutoConfig.from_pretrained(folder, local_files_only=True).vocab_size)
        tokens = fingerprint_tokens(vocabulary)
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([tokens], device=device), use_cache=False).logits[0, :-1].float()
        targets = torch.tensor(tokens[1:], device=device)
        logprobs = logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0].cpu()
    except VersionUnusable as error:
        raise VersionUnusable(f"{adapter or folder}: {error}") from error
    except Exception as error:
        raise VersionUnusable(f"{adapter or folder}: {type(error).__name__}: {str(error)[:500]}") from error
    if not bool(torch.isfinite(logprobs).all()):
        raise VersionUnusable(f"{adapter or folder}: its weights give logprobs that are not finite")
    return Fingerprint(token_ids=tokens, logprobs=tuple(logprobs.tolist()))


def load_model(folder: Path, adapter: Path | None, dtype: torch.dtype | None) -> Any:
    """Load the model in `folder`, and apply the adapter if there is one."""
    model, info = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=dtype or "auto",
        attn_implementation="eager",
        use_safetensors=True,
        local_files_only=True,
        trust_remote_code=False,
        output_loading_info=True,
        ignore_mismatched_sizes=True,
    )
    check_weights(model, info)
    if adapter is None:
        return model
    from peft import PeftModel

    return PeftModel.from_pretrained(model, str(adapter), is_trainable=False)


SERVICE = Service(
    "inference",
    "Makes versions of folders, and folders of versions.",
    InferenceSettings,
    "headrace_inference.importer:run",
)


def merge_adapter(blobs: BlobStore, adapter: BlobRef, base: BlobRef, target: Path) -> None:
    """Merge an adapter with its base, and write the model into the folder `target` for transformers and vLLM.

    The weights are added in float32 and rounded once to the base's type. Tokenizer, templates and generation settings
    are copies of the base's files.

    Raises:
        VersionUnusable: `adapter` is not an adapter of `base`.
    """
    adapter_manifest, base_manifest = versions.read_manifest(blobs, adapter), versions.read_manifest(blobs, base)
    if adapter_manifest.base != base_manifest.version:
        raise VersionUnusable(
            f"{adapter_manifest.version} is an adapter of {adapter_manifest.base}, not of {base_manifest.version}"
        )
    with tempfile.TemporaryDirectory(prefix="headrace-merge-") as name:
        folder = versions.fetch_version(blobs, base_manifest, Path(name) / "base")
        adapter_folder = versions.fetch_version(blobs, adapter_manifest, Path(name) / "adapter")
        model = load_model(folder, adapter_folder, torch.float32).merge_and_unload(safe_merge=True)
        model.to(_stored_type(folder)).save_pretrained(target, safe_serialization=True)
        for path in versions.model_files(folder):
            relative = path.relative_to(folder)
            if path.suffix != ".safetensors" and not path.name.endswith(".safetensors.index.json"):
                (target / relative).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target / relative)


def _stored_type(folder: Path) -> torch.dtype:
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    kind = getattr(config, "dtype", None) or torch.float32
    return kind if isinstance(kind, torch.dtype) else getattr(torch, str(kind))


async def run(common: Common, settings: InferenceSettings) -> None:
    """Run the filter on standard input and output. Raises `VersionUnusable` for a folder that cannot be imported."""
    lines = Lines()
    blobs = BlobStore.open(common)
    async for word, value in lines.read():
        if word == "folder":
            stored = Importer(blobs, settings).import_folder(FolderLine.model_validate_json(value))
            lines.write("stored", stored.model_dump_json().encode())
        elif word == "merge":
            line = MergeLine.model_validate_json(value)
            merge_adapter(blobs, line.adapter, line.base, Path(line.folder))
            lines.write("merged", MergedLine(folder=line.folder).model_dump_json().encode())
        else:
            raise ValueError(f"a line begins with {word!r}; it must begin with folder or merge")
        lines.flush()


if __name__ == "__main__":
    SERVICE.main()
