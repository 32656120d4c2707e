"""A version's own files, written from the model in memory: all weights in the base's type, or an adapter."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import modeling_utils

from headrace_runtime.versions import is_weights, model_files
from headrace_schemas.manifest import Fingerprint
from headrace_trainer.torch_learner.model.policy import Policy
from headrace_trainer.torch_learner.rounding import rounded

ABOUT = {"format": "pt"}
"""The metadata that the library gives to a file of weights."""


def dtype_of(folder: Path) -> torch.dtype:
    """The type that the model's files in `folder` have, so that a version is served as its base is."""
    config = json.loads((folder / "config.json").read_bytes())
    name = config.get("dtype") or config.get("torch_dtype") or "float32"
    found: torch.dtype = getattr(torch, name)
    return found


def write_weights(policy: Policy, folder: Path, dtype: torch.dtype) -> Fingerprint:
    """All weights in `dtype`, and nothing else. Returns what they answer."""
    weights = {key: rounded(tensor, dtype, key) for key, tensor in policy.tensors().items()}
    save_weights(policy, folder, weights)
    return policy.fingerprint(weights)


def save_weights(policy: Policy, folder: Path, weights: Mapping[str, Tensor]) -> None:
    """These, by the model's own names."""
    given = dict(weights)
    parameters = {name for name, _ in policy.model.named_parameters(remove_duplicate=False)}
    buffers = {name: tensor for name, tensor in policy.model.state_dict().items() if name not in parameters}
    policy.model.save_pretrained(folder, state_dict=buffers | given)  # a tied weight goes in once, as in the base
    for path in model_files(folder):
        if not is_weights(path.name):  # what the library has made of the configuration; the base's own counts
            path.unlink()


@dataclass(frozen=True)
class Planned:
    """What `save_weights` would write, without writing it."""

    files: Mapping[str, Mapping[str, Tensor]]
    """The tensors of each file, by their names in it. A given one that is in a file as it is, is the very object."""
    texts: Mapping[str, bytes]
    """Which file holds which, where there are several."""


def planned(policy: Policy, weights: Mapping[str, Tensor]) -> Planned:
    """`weights` may have no values (`meta`). One thread of a process at a time."""
    files: dict[str, Mapping[str, Tensor]] = {}

    def note(tensors: Mapping[str, Tensor], filename: str, metadata: Mapping[str, str]) -> None:
        assert dict(metadata) == ABOUT
        files[Path(filename).name] = dict(tensors)

    writes = modeling_utils.safe_save_file
    with tempfile.TemporaryDirectory(prefix="headrace-plan-") as name:
        modeling_utils.safe_save_file = note  # the library has no other way of saying it
        try:
            save_weights(policy, Path(name), weights)
        finally:
            modeling_utils.safe_save_file = writes
        texts = {path.name: path.read_bytes() for path in model_files(Path(name))}
    return Planned(files, texts)


def write_adapter(policy: Policy, folder: Path, base: str) -> Fingerprint:
    """PEFT's layout, which vLLM loads too. The configuration is made to hold no path and no order of a set. Returns
    what the base with the adapter answers."""
    save_adapter(policy, folder, base)
    return policy.fingerprint()


def save_adapter(policy: Policy, folder: Path, base: str, weights: Mapping[str, Tensor] | None = None) -> None:
    """`weights`: by the model's own names, where it has only parts of them."""
    policy.model.save_pretrained(folder, **({} if weights is None else {"state_dict": dict(weights)}))
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text(encoding="utf-8")) | {"base_model_name_or_path": base}
    config["target_modules"] = sorted(config["target_modules"])
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
