"""A loaded version, and the loading of model folders. It blocks, so it runs in the loading thread.

Transformers replaces missing weights by random ones. Here, a folder with missing, unexpected or misshapen tensors is
refused. Each adapter is a separate module over the tensors of its base, so a LoRA version needs memory only for its
adapter, and no version can change the results of another one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from headrace_inference.errors import VersionUnusable
from headrace_inference.torch_engine.kv import KVShape
from headrace_inference.torch_engine.program import ATTENTION, Program, Programs, share_tensors, tensors_of
from headrace_schemas.values.blobs import Manifest

_UNSTEADY_ROPE = frozenset(("dynamic", "longrope"))
"""Rotary embeddings that depend on the longest sequence in the batch, so that rows would affect each other."""


@dataclass(frozen=True, eq=False)
class Model:
    """A loaded version of a model, ready to compute. It never changes: new weights are loaded as another `Model`."""

    manifest: Manifest
    module: nn.Module
    weights: list[Tensor]
    program: Program
    kv_shape: KVShape
    vocabulary: int
    context_tokens: int

    @property
    def version(self) -> str:
        """Name of the version."""
        return self.manifest.version


class Loader:
    """Loads versions onto one device. Used by one thread at a time."""

    def __init__(self, device: torch.device, dtype: torch.dtype | None, context_max: int, *, trace: bool) -> None:
        """Create the loader.

        Args:
            device: the device.
            dtype: type of all weights, or None for the type in which the trainer computed a version's fingerprint. For
                versions without one it is float32 on a CPU, and that of the files on a GPU.
            context_max: largest length of a sequence.
            trace: whether to trace forward passes.
        """
        self._device = device
        self._dtype = dtype
        self._context_max = context_max
        self._programs = Programs(trace=trace)
        transformers_logging.disable_progress_bar()

    def load(self, folder: Path, manifest: Manifest, base: Model | None, base_folder: Path | None) -> Model:
        """Load a version. Raises `VersionUnusable` if the engine cannot serve it.

        Args:
            base: the loaded base of a LoRA version.
            base_folder: the folder of this base.
        """
        with _errors_of(manifest.version), torch.no_grad():
            if manifest.kind == "full":
                module, folders = self._full(folder, self.dtype_of(manifest)), [folder]
            elif base is None or base_folder is None:
                raise VersionUnusable(f"its base {manifest.base} is not loaded; routing must serve it too")
            else:
                module, folders = self._adapter(base.module, folder), [base_folder, folder]
            module.eval().requires_grad_(False)
            return self._model(manifest, module, folders)

    def dtype_of(self, manifest: Manifest) -> torch.dtype | None:
        """Return the type of the weights of a full version, or None for that of its files."""
        if self._dtype is None and manifest.fingerprint.dtype is not None:
            return torch.bfloat16
        return torch.float32 if self._dtype is None and self._device.type == "cpu" else self._dtype

    def _full(self, folder: Path, dtype: torch.dtype | None) -> nn.Module:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        _check_config(config)
        module, info = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype or "auto",
            attn_implementation=ATTENTION,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # `check_weights` names them
        )
        check_weights(module, info)
        loaded: nn.Module = module.to(self._device)
        return loaded

    def _adapter(self, base: nn.Module, folder: Path) -> nn.Module:
        from peft import PeftConfig, PeftModel

        config = PeftConfig.from_pretrained(str(folder))
        if str(getattr(config.peft_type, "value", config.peft_type)) != "LORA":
            raise VersionUnusable(f"adapters of type {config.peft_type} are not supported; LoRA is")
        if not (folder / "adapter_model.safetensors").exists():
            raise VersionUnusable("the adapter has no adapter_model.safetensors")
        adapted = PeftModel.from_pretrained(share_tensors(base), str(folder), is_trainable=False)
        _check_adapter(adapted, folder / "adapter_model.safetensors")
        return _as_module(adapted.get_base_model()).to(self._device)

    def _model(self, manifest: Manifest, module: nn.Module, folders: list[Path]) -> Model:
        config: Any = module.config
        shape = _kv_shape(module, self._device)
        context = min(self._context_max, int(config.max_position_embeddings))
        program = self._programs.get_program(module, folders, shape.zeros, context)
        return Model(
            manifest=manifest,
            module=module,
            weights=list(tensors_of(module).values()),
            program=program,
            kv_shape=shape,
            vocabulary=int(config.vocab_size),
            context_tokens=context,
        )


def check_weights(module: nn.Module, info: Mapping[str, Any]) -> None:
    """Check that the files contained a tensor for every weight of the module and only finite values.

    Args:
        info: report of transformers (`output_loading_info`).

    Raises:
        VersionUnusable: a tensor is missing, unexpected, misshapen or not finite.
    """
    wrong = {name: sorted(map(str, keys))[:3] for name, keys in info.items() if keys}
    if wrong:
        raise VersionUnusable(f"the weights are not those of its architecture: {wrong}")
    for name, parameter in module.named_parameters():
        if not bool(torch.isfinite(parameter).all()):
            raise VersionUnusable(f"the tensor {name} contains NaN or infinity")


def _as_module(value: Any) -> nn.Module:
    assert isinstance(value, nn.Module)
    return value


def _check_adapter(adapted: Any, file: Path) -> None:
    """Raise `VersionUnusable` unless the file has exactly the tensors that its configuration requires on this base.

    PEFT ignores unexpected tensors, and leaves missing ones at their random initial values.
    """
    from peft import get_peft_model_state_dict

    with safe_open(file, framework="pt") as opened:
        present = set(opened.keys())
    required = set(get_peft_model_state_dict(adapted, save_embedding_layers=False))
    if required - present:
        raise VersionUnusable(f"{file.name} has no {min(required - present)}")
    if present - required:
        name = min(present - required)
        raise VersionUnusable(f"{file.name} has {name}, which does not fit its base; it is an adapter of another base")


def _check_config(config: Any) -> None:
    layers = set(getattr(config, "layer_types", None) or ["full_attention"])
    if layers != {"full_attention"} or getattr(config, "is_encoder_decoder", False):
        raise VersionUnusable(f"layers of type {sorted(layers)} are not supported; full causal attention is")
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        raise VersionUnusable("sliding-window attention is not supported")
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope in _UNSTEADY_ROPE:
        raise VersionUnusable(f"rotary embeddings of type {rope!r} are not supported in a batch")


class _ShapeRecorder:
    """KV cache that only records the shapes of keys and values."""

    is_compileable = False

    def __init__(self) -> None:
        self.shapes: list[tuple[int, int, torch.dtype]] = []

    def get_seq_length(self, _layer: int = 0) -> int:
        return 0

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if key.shape != value.shape or layer != len(self.shapes):
            raise VersionUnusable("keys and values of different shape are not supported")
        self.shapes.append((key.shape[1], key.shape[3], key.dtype))
        return key, value


def _kv_shape(module: Any, device: torch.device) -> KVShape:
    """Return the KV shape of a model, by computing one token, because fields of configurations have various names."""
    recorder = _ShapeRecorder()
    zero = torch.zeros(1, 1, dtype=torch.int64, device=device)
    module(
        input_ids=zero,
        position_ids=zero,
        attention_mask=torch.zeros(1, 1, 1, 1, dtype=module.dtype, device=device),
        past_key_values=recorder,
        use_cache=True,
    )
    if len(set(recorder.shapes)) != 1:
        raise VersionUnusable(f"{type(module).__name__} has no uniform key-value cache")
    heads, size, dtype = recorder.shapes[0]
    return KVShape(len(recorder.shapes), heads, size, dtype, device)


@contextlib.contextmanager
def _errors_of(version: str) -> Iterator[None]:
    """Open a context in which exceptions of libraries become `VersionUnusable` with the name of the version."""
    try:
        yield
    except VersionUnusable as error:
        raise VersionUnusable(f"{version}: {error}") from error
    except Exception as error:
        raise VersionUnusable(f"{version}: {type(error).__name__}: {str(error)[:500]}") from error
