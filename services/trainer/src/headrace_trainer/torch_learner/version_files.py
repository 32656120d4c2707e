"""Writes a version's own files from the model in memory: all weights in the base's type, or an adapter."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import modeling_utils

from headrace_runtime.storage.versions import is_weights, model_files
from headrace_schemas.values.blobs import Fingerprint
from headrace_trainer.torch_learner import tensors
from headrace_trainer.torch_learner.model.masters import round_stochastically
from headrace_trainer.torch_learner.model.policy import Policy

ABOUT = {"format": "pt"}
"""The metadata that transformers writes into a file of weights."""


def dtype_of(folder: Path) -> torch.dtype:
    """Return the type of the weights in `folder`, so that a version has the type of its base."""
    config = json.loads((folder / "config.json").read_bytes())
    name = config.get("dtype") or config.get("torch_dtype") or "float32"
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def write_weights(policy: Policy, folder: Path, dtype: torch.dtype) -> None:
    """Write the files of all weights, rounded to `dtype`, into `folder`, with one tensor at a time in memory."""
    bare = {name: torch.empty(p.shape, dtype=dtype, device="meta") for name, p in policy.parameters.items()}
    plan, names = plan_files(policy, bare), {id(tensor): name for name, tensor in bare.items()}
    if not plan.is_exact(names):
        save_weights(policy, folder, _rounded(policy, dtype))
        return
    for file, file_tensors in plan.files.items():

        def value_of(key: str, file_tensors: Mapping[str, Tensor] = file_tensors) -> Tensor:
            name = names.get(id(file_tensors[key]))
            return file_tensors[key] if name is None else _round_weight(policy, name, dtype)

        tensors.write_file(folder / file, file_tensors, ABOUT, value_of)
    for file, content in plan.texts.items():
        (folder / file).write_bytes(content)


def fingerprint(policy: Policy, dtype: torch.dtype) -> Fingerprint:
    """Return the fingerprint of the weights that `write_weights` would write."""
    if dtype is torch.float32:
        return policy.fingerprint()
    return policy.fingerprint(_rounded(policy, dtype))


def _rounded(policy: Policy, dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: _round_weight(policy, name, dtype) for name in policy.parameters}


def _round_weight(policy: Policy, name: str, dtype: torch.dtype) -> Tensor:
    return round_stochastically(policy.parameters[name].detach().cpu(), dtype, name)


def save_weights(policy: Policy, folder: Path, weights: Mapping[str, Tensor]) -> None:
    """Write `weights` into `folder` under the names that the model's library gives them."""
    parameters = {name for name, _ in policy.model.named_parameters(remove_duplicate=False)}
    buffers = {name: tensor for name, tensor in policy.model.state_dict().items() if name not in parameters}
    policy.model.save_pretrained(
        folder, state_dict=buffers | dict(weights)
    )  # a tied weight is stored once, as in the base
    for path in model_files(folder):
        if not is_weights(path.name):  # the library's copy of the configuration; a version has the base's
            path.unlink()


@dataclass(frozen=True)
class WritePlan:
    """Contents of a version's files, as `save_weights` would write them: the tensors of each file, and index files."""

    files: Mapping[str, Mapping[str, Tensor]]
    """The tensors of each file, by their names in it. A tensor that is stored unchanged is the very object."""
    texts: Mapping[str, bytes]
    """Index files, which name the file of each tensor where there are several."""

    def is_exact(self, names: Mapping[int, str]) -> bool:
        """Return whether the files contain each tensor of the model unchanged.

        Otherwise the library derives a tensor from others, for example experts that are one tensor in the model.

        Args:
            names: names of the model's tensors by their identities.
        """
        stored = (tensor for file in self.files.values() for tensor in file.values())
        return all(id(tensor) in names for tensor in stored if tensor.is_meta)


def plan_files(policy: Policy, weights: Mapping[str, Tensor]) -> WritePlan:
    """Plan the files that `save_weights` would write. `weights` may be `meta` tensors.

    Not safe for concurrent use within a process.
    """
    files: dict[str, Mapping[str, Tensor]] = {}

    def note(contents: Mapping[str, Tensor], filename: str, metadata: Mapping[str, str]) -> None:
        assert dict(metadata) == ABOUT
        files[Path(filename).name] = dict(contents)

    writes = modeling_utils.safe_save_file
    with tempfile.TemporaryDirectory(prefix="headrace-plan-") as name:
        modeling_utils.safe_save_file = note  # the library has no other way to report its plan
        try:
            save_weights(policy, Path(name), weights)
        finally:
            modeling_utils.safe_save_file = writes
        texts = {path.name: path.read_bytes() for path in model_files(Path(name))}
    return WritePlan(files, texts)


def save_adapter(policy: Policy, folder: Path, base: str, weights: Mapping[str, Tensor] | None = None) -> None:
    """Write the policy's LoRA adapter into `folder` in PEFT's layout, which vLLM loads. Equal adapters give equal
    files.

    Args:
        base: name of the base version, for the configuration.
        weights: all weights by name; needed if the model has only a shard of them.
    """
    policy.model.save_pretrained(folder, **({} if weights is None else {"state_dict": dict(weights)}))
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text(encoding="utf-8")) | {"base_model_name_or_path": base}
    config["target_modules"] = sorted(config["target_modules"])
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
