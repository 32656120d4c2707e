"""Sizes of a training on one device, computed from the files of the base and the settings: memory, disk and work.

The terms are those of docs/algorithms.md ("What a step holds"); docs/guides/sizing.md compares them with measurements.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from headrace_runtime.storage.model_folder import stored_tensors
from headrace_trainer.experiences.templates import read_json
from headrace_trainer.settings import TrainerSettings

_PROCESS_BYTES = 700_000_000
"""Memory of a process with torch and no model."""
_TRAINED_BYTES = 16
"""Weight, gradient and two moments of a trained parameter, in float32."""
_FLOAT32, _BFLOAT16 = 4, 2
_MASTER_BYTES = 2
_OPTIMIZER_BYTES = 8
_CHUNK_BYTES = 3 * 64 * 2**20
_VERSIONS = 3
"""Versions that a replica holds at most times: champion, previous and candidate."""
_TYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
GB = 1e9


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a base."""

    parameters: int
    adapters: int
    """Parameters of the adapters, 0 without."""
    type_bytes: int
    """Bytes of a weight in the files."""
    layers: int
    hidden: int
    attention: int
    """Width of all heads together."""
    keys: int
    """Width of all heads of keys."""
    feed_forward: int

    @classmethod
    def read(cls, folder: Path, settings: TrainerSettings) -> Shape | None:
        """Read the shape of a base, or return None if its configuration names sizes in another way."""
        config = read_json(folder / "config.json")
        text = config.get("text_config", config) if isinstance(config, dict) else {}
        names = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size")
        if not isinstance(text, dict) or not all(isinstance(text.get(name), int) for name in names):
            return None
        layers, hidden, heads, feed_forward = (int(text[name]) for name in names)
        head = int(text.get("head_dim") or hidden // heads)
        tensors = [item for path in folder.glob("*.safetensors") for item in stored_tensors(path).items()]
        adapters = sum(
            settings.lora.rank * sum(tensor.shape)
            for name, tensor in tensors
            if len(tensor.shape) == 2 and name.removesuffix(".weight").rpartition(".")[2] in settings.lora.targets
        )
        return cls(
            parameters=sum(tensor.size for _, tensor in tensors),
            adapters=adapters,
            type_bytes=max((_TYPE_BYTES.get(tensor.dtype, _FLOAT32) for _, tensor in tensors), default=_FLOAT32),
            layers=layers,
            hidden=hidden,
            attention=heads * head,
            keys=int(text.get("num_key_value_heads") or heads) * head,
            feed_forward=feed_forward,
        )


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes and work of a training."""

    trained: int
    trainer_bytes: int
    """Peak memory of the trainer in a pass of `compute.pack_tokens` tokens."""
    replica_bytes: int
    """Memory of a replica with three versions, without keys and values."""
    version_bytes: int
    restore_point_bytes: int
    token_operations: int
    """Floating-point operations for each trained token."""

    @classmethod
    def of(cls, shape: Shape, settings: TrainerSettings) -> Sizes:
        """Compute the sizes of a training with these settings."""
        lora = bool(settings.lora.rank)
        trained = shape.adapters if lora else shape.parameters
        frozen_bytes = _BFLOAT16 if settings.compute.dtype == "bfloat16" else _FLOAT32
        held = trained * _TRAINED_BYTES + (shape.parameters * frozen_bytes if lora else 0)
        if not lora and settings.compute.weights == "bfloat16":
            held += trained * _MASTER_BYTES
        version = trained * (_FLOAT32 if lora else shape.type_bytes)
        restored = _OPTIMIZER_BYTES + (0 if lora or shape.type_bytes == _FLOAT32 else _FLOAT32)
        replica = shape.parameters * (frozen_bytes if lora else _FLOAT32)
        backward = 2 if lora else 4
        recomputed = 2 if settings.compute.gradient_checkpointing else 0
        return cls(
            trained=trained,
            trainer_bytes=_PROCESS_BYTES + held + _pass_bytes(shape, settings),
            replica_bytes=_PROCESS_BYTES + (replica + _VERSIONS * version if lora else _VERSIONS * replica),
            version_bytes=version,
            restore_point_bytes=trained * restored,
            token_operations=shape.parameters * (2 + backward + recomputed),
        )


def _pass_bytes(shape: Shape, settings: TrainerSettings) -> int:
    """Return the bytes of the activations of a pass and of a chunk of logits."""
    compute = settings.compute
    half = compute.dtype == "bfloat16" and (bool(settings.lora.rank) or compute.weights == "bfloat16")
    width = _BFLOAT16 if half else _FLOAT32
    layer = 6 * shape.hidden + 2 * (shape.attention + 2 * shape.keys) + 4 * shape.feed_forward
    if settings.lora.rank:
        layer += len(settings.lora.targets) * settings.lora.rank
    stored = shape.layers * layer
    if compute.gradient_checkpointing:
        stored = shape.layers * (shape.hidden + shape.attention) + layer
    return compute.pack_tokens * (stored * width + 2 * shape.hidden * _FLOAT32) + _CHUNK_BYTES


def describe(folder: Path, settings: TrainerSettings) -> Iterator[str]:
    """Yield sentences about the sizes of a training; none if the base's configuration has other names."""
    shape = Shape.read(folder, settings)
    if shape is None or not shape.parameters:
        return
    sizes, lora = Sizes.of(shape, settings), bool(settings.lora.rank)
    rate = settings.optimizer.of_size(shape.parameters, adapters=lora).rate
    kind = f"{sizes.trained:,} of adapters trained" if lora else "all trained"
    chosen = "" if settings.optimizer.learning_rate is not None else ", by the size of the model"
    yield f"{shape.parameters:,} parameters, {kind}; learning rate {rate:g}{chosen}"
    yield (
        f"memory: about {sizes.trainer_bytes / GB:.1f} GB for the trainer, at {settings.compute.pack_tokens:,} tokens "
        f"a pass; about {sizes.replica_bytes / GB:.1f} GB for a replica with three versions"
    )
    yield (
        f"disk: {sizes.version_bytes / GB:.2f} GB for each version, {sizes.restore_point_bytes / GB:.2f} GB for each "
        "restore point"
    )
    per_second = 1e11 / sizes.token_operations
    yield f"time: about {per_second:,.0f} trained tokens a second for each 100 GFLOP/s of matrix products"
