"""From the policy in memory to an immutable version in the blob store, and back to a folder to start from."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from headrace_runtime import versions as store
from headrace_runtime.blobs import BlobStore
from headrace_runtime.errors import SettingError
from headrace_schemas.blobs import BlobRef
from headrace_schemas.manifest import File, Manifest
from headrace_trainer.torch_learner.model.policy import Policy
from headrace_trainer.torch_learner.rounding import rounded


def check_base(folder: Path) -> None:
    """Raises `SettingError` when `folder` cannot be the start of a lineage (P7)."""
    if not folder.is_dir():
        raise SettingError("trainer.base", str(folder), "is not a folder")
    for pattern, what in (("*.safetensors", "weights in safetensors"), ("config.json", "config.json")):
        if not any(folder.glob(pattern)):
            raise SettingError("trainer.base", str(folder), f"has no {what}; convert the model first")
    if not (folder / store.TOKENIZER_FILE).exists():
        raise SettingError("trainer.base", str(folder), f"has no {store.TOKENIZER_FILE}; save a fast tokenizer there")


@contextlib.contextmanager
def unpacked(blobs: BlobStore, files: Iterable[File]) -> Iterator[Path]:
    """A folder with these files, for as long as the body runs. Raises `CorruptBlob` or `Unavailable`."""
    with tempfile.TemporaryDirectory(prefix="headrace-version-") as name:
        for file in files:
            path = Path(name) / file.path
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(blobs.get(file.blob))
        yield Path(name)


def base_files(blobs: BlobStore, folder: Path) -> tuple[File, ...]:
    """What a lineage starts from, by digest: each file is read once, and whatever becomes of it then changes nothing.
    Blocks."""
    return store.store_files(blobs, folder)


def publish_base(
    blobs: BlobStore, files: tuple[File, ...], policy: Policy, *, name: str, lineage: str
) -> tuple[Manifest, BlobRef]:
    """The base's own files, byte for byte, as step 0. Blocks."""
    with policy.as_base():
        fingerprint = policy.fingerprint()
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


def publish(
    blobs: BlobStore, policy: Policy, *, first: Manifest, lineage: str, step: int, parent: str
) -> tuple[Manifest, BlobRef]:
    """The present weights as a new version: a whole model, or an adapter on the lineage's first version. Blocks.

    Everything but the weights (configuration, tokenizer, templates) is the first version's, from the store.
    """
    with tempfile.TemporaryDirectory(prefix="headrace-version-") as name:
        folder = Path(name)
        if policy.lora:
            _write_adapter(policy, folder, first.version)
            fingerprint = policy.fingerprint()
            files = store.store_files(blobs, folder)
        else:
            weights = _rounded(policy, blobs, first)
            _write_weights(policy, folder, weights)
            fingerprint = policy.fingerprint(weights)
            kept = (file for file in first.files if not is_weights(file.path))
            files = tuple(sorted((*store.store_files(blobs, folder), *kept), key=lambda file: file.path))
    manifest = Manifest(
        name=first.name,
        lineage=lineage,
        step=step,
        parent=parent,
        kind="lora" if policy.lora else "full",
        base=first.version if policy.lora else None,
        files=files,
        fingerprint=fingerprint,
        tokenizer_sha256=first.tokenizer_sha256,
        template_sha256=first.template_sha256,
    )
    return store.store_manifest(blobs, manifest)


def check_same(folder: Path, first: Manifest, lineage: str) -> None:
    """Raises `SettingError` when `folder` is not what the lineage started from."""
    there = {path.relative_to(folder).as_posix(): store.file_digest(path) for path in store.model_files(folder)}
    then = {file.path: file.blob.sha256 for file in first.files}
    differing = sorted(name for name in there.keys() | then.keys() if there.get(name) != then.get(name))
    if differing:
        raise SettingError(
            "trainer.base",
            str(folder),
            f"{', '.join(differing)} differ from what lineage {lineage} started from; choose another trainer.lineage",
        )


def load(blobs: BlobStore, manifest: Manifest, policy: Policy) -> None:
    """Make the weights of `policy` those in a version's files. Blocks. Raises `CorruptBlob` or `Unavailable`."""
    with unpacked(blobs, manifest.files) as folder:
        policy.load_files(folder)


def weight_digests(manifest: Manifest) -> frozenset[str]:
    """What tells two versions of one lineage apart."""
    return frozenset(file.blob.sha256 for file in manifest.files if file.path.endswith(".safetensors"))


def is_weights(path: str) -> bool:
    """Whether a version's file holds weights, or says which file holds which."""
    return path.endswith((".safetensors", ".safetensors.index.json"))


def _rounded(policy: Policy, blobs: BlobStore, first: Manifest) -> dict[str, Tensor]:
    """The weights in the type that the base model's files have, so that a version is served as its base is."""
    (path,) = (file for file in first.files if file.path == "config.json")
    config = json.loads(blobs.get(path.blob))
    name = config.get("dtype") or config.get("torch_dtype") or "float32"
    return {key: rounded(tensor, getattr(torch, name), key) for key, tensor in policy.tensors().items()}


def _write_weights(policy: Policy, folder: Path, weights: dict[str, Tensor]) -> None:
    parameters = {name for name, _ in policy.model.named_parameters(remove_duplicate=False)}
    buffers = {name: tensor for name, tensor in policy.model.state_dict().items() if name not in parameters}
    policy.model.save_pretrained(folder, state_dict=buffers | weights)  # a tied weight goes in once, as in the base
    for path in store.model_files(folder):
        if not is_weights(path.name):  # what the library has made of the configuration; the base's own counts
            path.unlink()


def _write_adapter(policy: Policy, folder: Path, base: str) -> None:
    """PEFT's layout, which vLLM loads too. The configuration is made to hold no path and no order of a set."""
    policy.model.save_pretrained(folder)
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text(encoding="utf-8")) | {"base_model_name_or_path": base}
    config["target_modules"] = sorted(config["target_modules"])
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
