"""The model in training: all its weights, or LoRA adapters on frozen ones.

Loaded from the folder that the lineage started from, which is compared with the stored first version at every start.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.func import functional_call
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from headrace_runtime.errors import SettingError
from headrace_runtime.process import liveness
from headrace_runtime.process.logs import get_logger
from headrace_runtime.storage.versions import fingerprint_tokens
from headrace_schemas.values.blobs import Fingerprint
from headrace_trainer.batches.batch import Row
from headrace_trainer.settings import ComputeSettings, LoraSettings
from headrace_trainer.sizes import Shape, pack_tokens
from headrace_trainer.torch_learner.model import (
    attention,
    configuration,
    devices,
    forward,
    masters,
    norms,
    recomputing,
    sequence_bound,
)
from headrace_trainer.torch_learner.model.configuration import architecture_of, config_of, first_line
from headrace_trainer.torch_learner.model.devices import device_of, resolve_types, weights_dtype
from headrace_trainer.torch_learner.model.forward import Pack
from headrace_trainer.torch_learner.model.head import Head, Slope
from headrace_trainer.torch_learner.stored_tensors import copy_sharded_like, cpu_copy

log = get_logger(__name__)

_PROBE_TOKENS = 12
_WHOLE_REMEDY = "a pass holds loss tokens x vocabulary several times over; lower trainer.compute.pack_tokens"
_PACKING_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.2}
"""Logprob difference that rounding may make between a packed and a single pass."""


class Policy:
    """The model in training: its trained weights (`parameters`, float32), and its logprobs.

    Not safe for concurrent use.
    """

    def __init__(
        self, model: Any, compute: ComputeSettings, device: torch.device, *, lora: bool, pack_tokens: int
    ) -> None:
        self.model = model
        self.pack_tokens = pack_tokens
        """Tokens of one pass."""
        self.lora = lora
        self.device = device
        self._compute = compute
        self._reference: Any = None
        self._rounds = compute.weights == "bfloat16" and not lora
        self.parameters: dict[str, nn.Parameter] = masters.create(model) if self._rounds else _trained(model)

    @classmethod
    def open(cls, folder: Path, compute: ComputeSettings, lora: LoraSettings, seed: int) -> Policy:
        """Load the model in `folder` for training. Raises `SettingError` if it does not support the settings."""
        torch.set_num_threads(compute.threads)
        transformers_logging.disable_progress_bar()
        device = device_of(compute.device)
        if device.type == "cpu":
            devices.prepare()
        compute = resolve_types(compute, device)
        if compute.weights == "bfloat16":
            _check_rounded(folder)
        model = _load(folder, compute, frozen=bool(lora.rank)).to(cls._load_device(device))
        if compute.gradient_checkpointing:
            recomputing.enable(model, device, compute.dtype)
        if lora.rank:
            model = norms.add_adapters(model, lora, seed)
            if compute.gradient_checkpointing:
                model.enable_input_require_grads()
        model.train(compute.gradient_checkpointing)
        if compute.compile:
            from headrace_trainer.torch_learner.model import compiled  # imported here, because it takes seconds

            compiled.check(device)
            compiled.mark_layers(model)
        cls._finish_loading(model, device)
        tokens = pack_tokens(Shape.read(folder, lora), compute, lora, on_cpu=device.type == "cpu")
        policy = cls(model, compute, device, lora=bool(lora.rank), pack_tokens=tokens)
        if compute.packing == "blocks":
            policy.check_packing(folder)
        return policy

    @classmethod
    def _load_device(cls, device: torch.device) -> torch.device:
        """Return the device that the weights are loaded to."""
        return device

    @classmethod
    def _finish_loading(cls, model: Any, device: torch.device) -> None:
        """Hook that subclasses override to change the loaded model before other objects refer to its weights."""

    def keep_reference(self, folder: Path) -> None:
        """Load the first version's weights for `reference_logprobs`. Adapters need no second copy of the weights."""
        if not self.lora:
            self._reference = _load(folder, self._compute, frozen=True).to(self._load_device(self.device)).eval()

    @property
    def size(self) -> int:
        """Number of parameters of the whole model, also where only adapters are trained."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def hidden(self) -> frozenset[str]:
        """Names of the matrices between hidden layers, for which Muon is made.

        These are not embeddings, the head, or parameters of routers or mixers that only look like matrices. They are
        derived from the type and position of modules, and not from their names.
        """
        tables = [self.model.get_input_embeddings(), self.model.get_output_embeddings()]
        outside = {id(part) for table in tables if table is not None for part in table.modules()}
        layers = [part for part in self.model.modules() if isinstance(part, nn.ModuleList)]
        inside = {id(part) for layer in layers for part in layer.modules()} - outside
        maps = {
            id(part.weight)
            for part in self.model.modules()
            if id(part) in inside and (isinstance(part, nn.Linear) or type(part).__name__ == "Conv1D")
        }
        return frozenset(
            name
            for name, p in _trained(self.model).items()
            if id(p) in maps and p.ndim == 2 and self.vocabulary not in p.shape
        )

    @property
    def vocabulary(self) -> int:
        return int(self.model.get_input_embeddings().num_embeddings)

    @property
    def context(self) -> int:
        """Largest context length of the model in tokens, from its configuration."""
        return sequence_bound.context_of(self.model.config.get_text_config())

    def sequence_bound(self) -> int:
        """Return the longest sequence, in tokens, that a step has memory for. Call it before the first step.

        Raises:
            SettingError: Not even a short sequence fits.
        """
        free = sequence_bound.free_bytes(self.device)
        if free is None:
            return self.context
        recomputed = self._compute.gradient_checkpointing
        row = _plain_row(fingerprint_tokens(self.vocabulary))
        trained = sum(parameter.numel() for parameter in self.parameters.values())
        with self.disable_compilation():
            fitting = sequence_bound.tokens(free, trained, sequence_bound.token_bytes(self, row, recomputed=recomputed))
        if fitting < row.length:
            remedy = f"{free / 1e9:.1f} GB have room for {fitting} tokens; train adapters, or set the number of tokens"
            raise SettingError("trainer.memory.sequence_tokens", "none", remedy)
        return fitting

    def collate(self, rows: list[Row]) -> Pack:
        return forward.collate(rows, self.device, padded=self._compute.packing == "padded")

    @torch.no_grad()
    def check_packing(self, folder: Path) -> None:
        """Raise `SettingError` if sequences packed into one row influence each other, or logprobs are not finite."""
        rows = [_plain_row(fingerprint_tokens(self.vocabulary)[start : start + 12]) for start in (0, 12, 24)]
        try:
            with self.disable_compilation():
                together_N = self.logprobs(self.collate(rows))[0]
                alone_N = torch.cat([self.logprobs(self.collate([row]))[0] for row in rows])
            difference = float((together_N - alone_N).abs().max())
        except Exception as error:  # noqa: BLE001 (a model's code may raise any error with a mask that is not its own)
            difference, reason = float("inf"), f"its code does not accept this attention: {first_line(error)}"
        else:
            reason = f"packed logprobs differ by {difference:.2g} nats"
            if not bool(alone_N.isfinite().all()):
                remedy = "its logprobs contain NaN or infinity; use an intact model with its own config.json"
                raise SettingError("trainer.base", str(folder), remedy)
        if not difference <= _PACKING_TOLERANCE[self._compute.dtype]:
            raise _not_packed(self.model.config, reason)

    def logprobs(self, pack: Pack) -> tuple[Tensor, Tensor]:
        """Return `(logprobs_N, entropy_N)` under the present weights."""
        with self._autocast():
            return forward.logprobs(self.model, self.head, pack)

    @torch.no_grad()
    def hidden_states(self, pack: Pack) -> Tensor:
        """Return the last hidden states before each loss token in float32. The head must be computable separately."""
        with self._autocast():
            return forward.hidden(self.model, self.head, pack).float()

    def backward(self, pack: Pack, slope: Slope) -> tuple[Tensor, Tensor]:
        """Return the result of `logprobs`, and add the gradients of the loss whose derivative `slope` returns."""
        with self._autocast():
            return forward.backward(self.model, self.head, pack, slope)

    @cached_property
    def head(self) -> Head:
        """Output head, which converts hidden states to logits. The first access runs the model to examine the head."""
        return self._head_of(self.model)

    def _head_of(self, model: Any) -> Head:
        with self.disable_compilation():
            output = Head.of(model, fingerprint_tokens(self.vocabulary)[:_PROBE_TOKENS])
        if output.unchunked_reason is not None:
            architecture = architecture_of(model.config)
            log.warning(
                "head_not_chunked", architecture=architecture, reason=output.unchunked_reason, remedy=_WHOLE_REMEDY
            )
        return replace(output, compiled=self._compute.compile)

    @contextlib.contextmanager
    def without_adapters(self) -> Iterator[None]:
        """Open a context in which adapters are disabled. It has no effect if all weights are trained."""
        with self.model.disable_adapter() if self.lora else contextlib.nullcontext():
            yield

    @torch.no_grad()
    def reference_logprobs(self, pack: Pack) -> Tensor:
        """Return the logprobs under the first version's weights. Call `keep_reference` first."""
        with self._autocast(), self.without_adapters():
            return forward.logprobs(*self._first, pack)[0]

    @torch.no_grad()
    def reference_hidden(self, pack: Pack) -> Tensor:
        """Return the first version's last hidden states for the tokens of the loss."""
        with self._autocast(), self.without_adapters():
            return forward.hidden(*self._first, pack)

    @property
    def reference_head(self) -> Head:
        return self._first[1]

    @property
    def _first(self) -> tuple[Any, Head]:
        return (self.model, self.head) if self._reference is None else (self._reference, self._reference_head)

    @cached_property
    def _reference_head(self) -> Head:
        return self._head_of(self._reference)

    def tensors(self) -> dict[str, Tensor]:
        """Return copies of the trained weights on the CPU."""
        return {name: cpu_copy(parameter) for name, parameter in self.parameters.items()}

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the result of `tensors`.

        Raises `SettingError` if it is of another model or of adapters with another shape.
        """
        shapes = {name: tuple(parameter.shape) for name, parameter in self.parameters.items()}
        if shapes != {name: tuple(tensor.shape) for name, tensor in tensors.items()}:
            raise SettingError(
                "trainer.lora",
                f"{len(shapes)} tensors",
                "does not fit the saved lineage; choose another trainer.lineage",
            )
        for name, parameter in self.parameters.items():
            parameter.copy_(copy_sharded_like(parameter, tensors[name]))
            liveness.progress()
        self.update_weights()

    def update_weights(self) -> None:
        """Round the float32 weights again to the type that the model computes with. Call it when `parameters` have
        changed.
        """
        if self._rounds:
            masters.update_weights(self.model, self.parameters, compiled=self._compute.compile)

    @torch.no_grad()
    def load_files(self, folder: Path) -> None:
        """Load the weights from a version's folder: a whole model, or an adapter where adapters are trained."""
        if self.lora:
            from peft import set_peft_model_state_dict

            set_peft_model_state_dict(self.model, load_file(folder / "adapter_model.safetensors"))
        else:
            loaded = _load(folder, self._compute, frozen=False)
            self.load({name: parameter.data for name, parameter in loaded.named_parameters()})

    @torch.no_grad()
    def fingerprint(self, published: Mapping[str, Tensor] | None = None) -> Fingerprint:
        """Return the logprobs at temperature 1 of a fixed token sequence, by which an engine checks the files it loads.

        `published` replaces weights by those in the version's files, where they are rounded.
        """
        token_ids = fingerprint_tokens(self.vocabulary)
        inputs = {"input_ids": torch.tensor([token_ids], device=self.device), "use_cache": False}
        replaced = published or (dict(self.model.named_parameters()) if self._rounds else {})
        weights = {name: tensor.to(self.device, torch.float32) for name, tensor in replaced.items()}
        with self.disable_compilation():
            logits_TV = functional_call(self.model, weights, (), inputs).logits[0, :-1].float()
        targets_T = torch.tensor(token_ids[1:], device=self.device)
        logprobs_T = logits_TV.log_softmax(-1).gather(-1, targets_T[:, None]).squeeze(-1)
        frozen_in_bfloat16 = self.lora and weights_dtype(self._compute, frozen=True) is torch.bfloat16
        dtype: Literal["bfloat16"] | None = "bfloat16" if frozen_in_bfloat16 else None
        return Fingerprint(token_ids=token_ids, logprobs=logprobs_T.tolist(), dtype=dtype)

    @contextlib.contextmanager
    def _autocast(self) -> Iterator[None]:
        enabled = self._compute.dtype == "bfloat16" and not self._rounds
        with torch.autocast(self.device.type, torch.bfloat16, enabled=enabled):
            yield

    def disable_compilation(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which no code is compiled, for single calls."""
        if not self._compute.compile:
            return contextlib.nullcontext()
        from headrace_trainer.torch_learner.model import compiled

        return compiled.disable_compilation()


def _trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def _plain_row(token_ids: Sequence[int]) -> Row:
    """Return a row in which every token but the first is in the loss, at temperature 1."""
    length = len(token_ids)
    mask, zeros = np.arange(length) > 0, np.zeros(length, np.float32)
    return Row("", 0, np.array(token_ids, np.int32), mask, zeros, zeros + 1, np.float32(0), ~mask)


def _load(folder: Path, compute: ComputeSettings, *, frozen: bool) -> Any:
    for path in folder.glob("*.safetensors"):
        try:
            with safe_open(path, "pt"):
                pass
        except SafetensorError as error:
            raise SettingError("trainer.base", str(path), f"is not a safetensors file: {error}") from None
    implementation = attention.BLOCKS if compute.packing == "blocks" else _padded_attention(folder)
    model = from_folder(folder, weights_dtype(compute, frozen=frozen), implementation)
    attention.replace_length_ropes(model)
    if not compute.compile:  # a compiler fuses norms with the operations around them
        norms.fuse(model)
    return model


def from_folder(folder: Path, dtype: torch.dtype, attn_implementation: str | None) -> Any:
    """Load a causal language model with transformers. Raise `SettingError`, also for missing or superfluous weights."""
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            attn_implementation=attn_implementation,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # `check_whole` names them
        )
    except Exception as error:  # noqa: BLE001 (damaged files raise any error)
        if attn_implementation == attention.BLOCKS and attention.BLOCKS in str(error):
            raise _not_packed(config_of(folder), "its code accepts only a fixed list of attentions") from None
        reason = first_line(error)
        raise SettingError("trainer.base", str(folder), f"is no model that transformers can load: {reason}") from None
    configuration.check_weights(folder, model, info)
    return model


def _check_rounded(folder: Path) -> None:
    """Raise `SettingError` unless the base's files are bfloat16, as `trainer.compute.weights` requires."""
    dtype = config_of(folder).dtype
    if dtype is not torch.bfloat16:
        remedy = (
            f'the files of trainer.base are {str(dtype).removeprefix("torch.")}, and so are its versions; set "float32"'
        )
        raise SettingError("trainer.compute.weights", "bfloat16", remedy)


def _not_packed(config: Any, reason: str) -> SettingError:
    remedy = f'{architecture_of(config)} cannot be packed ({reason}); set "padded"'
    return SettingError("trainer.compute.packing", "blocks", remedy)


def _padded_attention(folder: Path) -> str | None:
    """Return the attention implementation for padded passes: eager for models with a bound on scores, else None.

    The fused attention would ignore the bound. None is the model's own choice, the fused one.
    """
    softcap = getattr(config_of(folder).get_text_config(), "attn_logit_softcapping", None)
    return "eager" if softcap else None
