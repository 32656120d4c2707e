"""From the policy in memory to an immutable version in the blob store, and back to a folder to start from."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from headrace_runtime import versions as store
from headrace_runtime.blobs import BlobStore
from headrace_runtime.errors import SettingError
from headrace_schemas.blobs import BlobRef
from headrace_schemas.manifest import Manifest
from headrace_trainer.policy import Policy

_WEIGHTS = ("*.safetensors", "*.safetensors.index.json")


def check_base(folder: Path) -> None:
    """Raises `SettingError` when `folder` cannot be the start of a lineage (P7)."""
    if not folder.is_dir():
        raise SettingError("trainer.base", str(folder), "is not a folder")
    for pattern, what in (("*.safetensors", "weights in safetensors"), ("config.json", "config.json")):
        if not any(folder.glob(pattern)):
            raise SettingError("trainer.base", str(folder), f"has no {what}; convert the model first")
    if not (folder / store.TOKENIZER_FILE).exists():
        raise SettingError("trainer.base", str(folder), f"has no {store.TOKENIZER_FILE}; save a fast tokenizer there")


def publish_base(
    blobs: BlobStore, folder: Path, policy: Policy, *, name: str, lineage: str
) -> tuple[Manifest, BlobRef]:
    """The folder's own files, byte for byte, as step 0. Blocks."""
    with policy.as_base():
        fingerprint = policy.fingerprint()
    return store.store(blobs, folder, name=name, lineage=lineage, step=0, fingerprint=fingerprint)


def publish(
    blobs: BlobStore, base_folder: Path, policy: Policy, *, first: Manifest, lineage: str, step: int, parent: str
) -> tuple[Manifest, BlobRef]:
    """The present weights as a new version: a whole model, or an adapter on the lineage's first version. Blocks.

    Everything but the weights (configuration, tokenizer, template) is copied from the first version unchanged.
    """
    with tempfile.TemporaryDirectory(prefix="headrace-version-") as name:
        folder = Path(name)
        if policy.lora:
            _write_adapter(policy, folder, first.version)
            fingerprint = policy.fingerprint()
        else:
            weights = _rounded(policy, base_folder)
            _write_model(policy, folder, base_folder, weights)
            fingerprint = policy.fingerprint(weights)
        return store.store(
            blobs,
            folder,
            name=first.name,
            lineage=lineage,
            step=step,
            fingerprint=fingerprint,
            parent=parent,
            base=first.version if policy.lora else None,
            tokenizer=base_folder,
        )


def check_same(folder: Path, first: Manifest, lineage: str) -> None:
    """Raises `SettingError` when `folder` is not what the lineage started from."""
    there = {path.name: store.file_digest(path) for path in store.model_files(folder)}
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
    with tempfile.TemporaryDirectory(prefix="headrace-version-") as name:
        for file in manifest.files:
            (Path(name) / file.path).write_bytes(blobs.get(file.blob))
        policy.load_files(Path(name))


def weight_digests(manifest: Manifest) -> frozenset[str]:
    """What tells two versions of one lineage apart."""
    return frozenset(file.blob.sha256 for file in manifest.files if file.path.endswith(".safetensors"))


def _rounded(policy: Policy, base_folder: Path) -> dict[str, Tensor]:
    """The weights in the type that the base model's files have, so that a version is served as its base is."""
    config = json.loads((base_folder / "config.json").read_text(encoding="utf-8"))
    name = config.get("dtype") or config.get("torch_dtype") or "float32"
    return {key: tensor.to(getattr(torch, name)) for key, tensor in policy.tensors().items()}


def _write_model(policy: Policy, folder: Path, base_folder: Path, weights: dict[str, Tensor]) -> None:
    parameters = {name for name, _ in policy.model.named_parameters(remove_duplicate=False)}
    buffers = {name: tensor for name, tensor in policy.model.state_dict().items() if name not in parameters}
    policy.model.save_pretrained(folder, state_dict=buffers | weights)  # a tied weight goes in once, as in the base
    weight_files = {path.name for pattern in _WEIGHTS for path in base_folder.glob(pattern)}
    for path in store.model_files(base_folder):
        if path.name not in weight_files:
            shutil.copyfile(path, folder / path.name)


def _write_adapter(policy: Policy, folder: Path, base: str) -> None:
    """PEFT's layout, which vLLM loads too. The configuration is made to hold no path and no order of a set."""
    policy.model.save_pretrained(folder)
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text(encoding="utf-8")) | {"base_model_name_or_path": base}
    config["target_modules"] = sorted(config["target_modules"])
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
