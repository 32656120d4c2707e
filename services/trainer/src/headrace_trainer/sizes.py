"""Sizes of a training on one device, computed from the files of the base and the settings: memory, disk and work.

The terms are those of docs/algorithms.md ("What a step holds"); docs/guides/sizing.md compares them with measurements.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue

from headrace_runtime.storage.model_folder import StoredTensor, stored_tensors
from headrace_trainer.experiences.templates import read_json
from headrace_trainer.settings import ComputeSettings, LoraSettings, OptimizerSettings, TrainerSettings

_PROCESS_BYTES = 750_000_000
"""Memory of a process with torch and no model."""
_TRAINED_BYTES = 16
"""Weight, gradient and two moments of a trained parameter, in float32."""
_FLOAT32, _BFLOAT16 = 4, 2
_MASTER_BYTES = 2
_OPTIMIZER_BYTES = 8
_CONTEXT_TOKENS_MAX = 32_768
"""Longest sequence that a replica serves at its default."""
_CONTEXT_COPIES = 4
"""Keys and values of a whole context that a replica holds while it compares its trace with the model's own code."""
_CHUNK_BYTES = 3 * 64 * 2**20
PACK_TOKENS, _PACK_TOKENS_MIN = 4096, 512
"""Default of `compute.pack_tokens`, and its least value for large models on a CPU."""
_CPU_PASS_BYTES = 2 << 30
"""Activations of a pass on a CPU, which decide the default for large models."""
_TRAINER_BYTES_MAX = 8_000_000_000
"""Memory of the trainer on a machine of 16 GB, which a replica and the other services share."""
_LORA_RANK = 16
_LARGE = 50_000_000
"""Parameters from which a step on a CPU takes seconds, so that its products are computed in bfloat16 where it can."""
_VERSIONS = 3
"""Versions that a replica holds at most times: champion, previous and candidate."""
_NUMBER_MAX = 2**40
_TYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
GB = 1e9


@dataclass(frozen=True, slots=True)
class Shape:
    """Architecture of a base model: its numbers of parameters and layers and their widths."""

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
    context: int
    """Longest sequence that the model was made for, in tokens."""

    @classmethod
    def read(cls, folder: Path, lora: LoraSettings) -> Shape | None:
        """Read the shape of a base. Return None if its configuration is damaged or has other fields for the sizes."""
        config = read_json(folder / "config.json")
        text = config.get("text_config", config) if isinstance(config, dict) else {}
        names = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size")
        further = ("head_dim", "num_key_value_heads", "max_position_embeddings")
        if not isinstance(text, dict) or not all(_is_number(text.get(name)) for name in names):
            return None
        if not all(text.get(name) is None or _is_number(text[name]) for name in further):
            return None
        layers, hidden, heads, feed_forward = (int(text[name]) for name in names)
        head = int(text.get("head_dim") or hidden // heads)
        try:
            tensors = _tensors(folder)
        except (OSError, ValueError):
            return None  # the check names the problem
        adapters = sum(
            lora.rank * sum(tensor.shape)
            for name, tensor in tensors.items()
            if len(tensor.shape) == 2 and name.removesuffix(".weight").rpartition(".")[2] in lora.targets
        )
        return cls(
            parameters=sum(tensor.size for tensor in tensors.values()),
            adapters=adapters,
            type_bytes=max((_TYPE_BYTES.get(tensor.dtype, _FLOAT32) for tensor in tensors.values()), default=_FLOAT32),
            layers=layers,
            hidden=hidden,
            attention=heads * head,
            keys=int(text.get("num_key_value_heads") or heads) * head,
            feed_forward=feed_forward,
            context=int(text.get("max_position_embeddings") or _CONTEXT_TOKENS_MAX),
        )


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= _NUMBER_MAX


def matrix_names(folder: Path) -> set[str]:
    """Return the names of the linear modules in a base model's layers, such as `q_proj`, to which LoRA can be
    applied.
    """
    matrices = [name for name, tensor in _tensors(folder).items() if len(tensor.shape) == 2]
    paths = [name.split(".")[:-1] for name in matrices if name.endswith(".weight")]
    return {path[-1] for path in paths if any(part.isdecimal() for part in path[:-1])}


def _tensors(folder: Path) -> dict[str, StoredTensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in stored_tensors(path).items()}


@dataclass(frozen=True, slots=True)
class Sizes:
    """Estimated memory, disk space and computation of a training on one device."""

    trained: int
    trainer_bytes: int
    """Peak memory of the trainer: a pass of `compute.pack_tokens` tokens, and with `save_beside` the copy of a save."""
    replica_bytes: int
    """Memory of a replica with three versions, without keys and values."""
    loading_bytes: int
    """Peak memory of a replica while it loads its first version."""
    version_bytes: int
    restore_point_bytes: int
    token_operations: int
    """Floating-point operations for each trained token."""

    @classmethod
    def of(cls, shape: Shape, settings: TrainerSettings) -> Sizes:
        """Estimate the sizes of a training from the shape of the base and the settings."""
        lora = bool(settings.lora.rank)
        trained = shape.adapters if lora else shape.parameters
        frozen_bytes = _BFLOAT16 if settings.compute.dtype == "bfloat16" else _FLOAT32
        mapped = shape.parameters * shape.type_bytes if lora and frozen_bytes < shape.type_bytes else 0
        weights = trained * _TRAINED_BYTES + (shape.parameters * frozen_bytes + mapped if lora else 0)
        if not lora and settings.compute.weights == "bfloat16":
            weights += trained * _MASTER_BYTES
        version = trained * (_FLOAT32 if lora else shape.type_bytes)
        shared = not lora and shape.type_bytes == _FLOAT32  # the version has the same weights, which are stored once
        restored = _OPTIMIZER_BYTES + (0 if shared else _FLOAT32)
        served_bytes = frozen_bytes if lora else _FLOAT32
        replica = shape.parameters * served_bytes + mapped
        copied = trained * (_FLOAT32 + _OPTIMIZER_BYTES) if settings.save_beside else 0
        reference = shape.parameters * frozen_bytes if settings.needs_base and not lora else 0
        context = 2 * shape.layers * shape.keys * served_bytes * min(shape.context, _CONTEXT_TOKENS_MAX)
        backward = 2 if lora else 4
        recomputed = 2 if settings.compute.gradient_checkpointing else 0
        return cls(
            trained=trained,
            trainer_bytes=_PROCESS_BYTES + weights + reference + _pass_bytes(shape, settings) + copied,
            replica_bytes=_PROCESS_BYTES + (replica + _VERSIONS * version if lora else _VERSIONS * replica),
            loading_bytes=_PROCESS_BYTES + replica + _CONTEXT_COPIES * context,
            version_bytes=version,
            restore_point_bytes=trained * restored,
            token_operations=shape.parameters * (2 + backward + recomputed),
        )


def _pass_bytes(shape: Shape, settings: TrainerSettings) -> int:
    """Return the bytes of the activations and of a chunk of logits in a forward pass on a CPU."""
    tokens = pack_tokens(shape, settings.compute, settings.lora, on_cpu=True)
    return tokens * _token_bytes(shape, settings.compute, settings.lora) + _CHUNK_BYTES


def pack_tokens(shape: Shape | None, compute: ComputeSettings, lora: LoraSettings, *, on_cpu: bool) -> int:
    """Return the tokens of one forward pass: `compute.pack_tokens`, or its default for a model of this shape.

    Args:
        shape: shape of the base; None if it is unknown.
    """
    if compute.pack_tokens is not None:
        return compute.pack_tokens
    if shape is None or not on_cpu:
        return PACK_TOKENS
    fitting = _CPU_PASS_BYTES // _token_bytes(shape, compute, lora)
    return max(_PACK_TOKENS_MIN, min(PACK_TOKENS, 1 << (fitting.bit_length() - 1 if fitting else 0)))


def _token_bytes(shape: Shape, compute: ComputeSettings, lora: LoraSettings) -> int:
    """Return the bytes of activations that each token of a forward pass needs."""
    half = compute.dtype == "bfloat16" and (bool(lora.rank) or compute.weights == "bfloat16")
    width = _BFLOAT16 if half else _FLOAT32
    layer = 6 * shape.hidden + 2 * (shape.attention + 2 * shape.keys) + 4 * shape.feed_forward
    if lora.rank:
        layer += len(lora.targets) * lora.rank
    layer_bytes = layer * width
    if lora.rank and half:  # frozen layers keep no input, and adapters, in float32, each a copy of its own
        inputs = {"o_proj": shape.attention, "down_proj": shape.feed_forward}
        copied = sum(inputs.get(target, shape.hidden) for target in lora.targets)
        layer_bytes = layer // 2 * width + copied * _FLOAT32
    stored_bytes = shape.layers * layer_bytes
    if compute.gradient_checkpointing:
        stored_bytes = shape.layers * (shape.hidden + shape.attention) * width + layer_bytes
    return stored_bytes + 2 * shape.hidden * _FLOAT32


def describe_sizes(folder: Path, settings: TrainerSettings) -> Iterator[str]:
    """Yield sentences about the sizes of a training; none if the base's configuration has other fields for sizes."""
    shape = Shape.read(folder, settings.lora)
    if shape is None or not shape.parameters:
        return
    sizes, lora = Sizes.of(shape, settings), bool(settings.lora.rank)
    kind = f"{sizes.trained:,} of adapters trained" if lora else "all trained"
    yield f"{shape.parameters:,} parameters, {kind}; learning rate {_rate_text(shape, settings.optimizer, lora=lora)}"
    if lora and (without := set(settings.lora.targets) - matrix_names(folder)):
        yield f"trainer.lora.targets: the base has no {', '.join(sorted(without))}; the other targets get adapters"
    tokens = pack_tokens(shape, settings.compute, settings.lora, on_cpu=True)
    yield (
        f"memory: about {sizes.trainer_bytes / GB:.1f} GB for the trainer, at {tokens:,} tokens a pass on a CPU; about "
        f"{sizes.replica_bytes / GB:.1f} GB for a replica with three versions, without keys and values "
        f"(inference.torch.kv_mib_max), and {sizes.loading_bytes / GB:.1f} GB while it loads the first one"
    )
    yield (
        f"disk: {sizes.version_bytes / GB:.2f} GB for each version, {sizes.restore_point_bytes / GB:.2f} GB for each "
        "restore point"
    )
    per_second = 1e11 / sizes.token_operations
    yield f"time: about {per_second:,.0f} trained tokens a second for each 100 GFLOP/s of matrix products"


def _rate_text(shape: Shape, optimizer: OptimizerSettings, *, lora: bool) -> str:
    by_size = (
        optimizer.model_copy(update={"learning_rate": None}).with_rate_for_size(shape.parameters, adapters=lora).rate
    )
    if optimizer.learning_rate is None:
        return f"{by_size:g}, by the size of the model"
    if optimizer.learning_rate == by_size:
        return f"{by_size:g}"
    kind = "adapters of a model" if lora else "a model"
    return f"{optimizer.learning_rate:g}; without this setting {by_size:g}, as for {kind} of this size"


def suggest_settings(folder: Path, settings: TrainerSettings) -> dict[str, JsonValue]:
    """Return settings for training a base on a machine with 16 GB of memory and without a GPU.

    All weights are trained if the trainer's memory suffices, otherwise adapters. The result is empty if the shape of
    the base is unknown.
    """
    shape = Shape.read(folder, settings.lora.model_copy(update={"rank": _LORA_RANK}))
    if shape is None or not shape.parameters:
        return {}
    values: dict[str, JsonValue] = {}
    lora, compute = settings.lora, settings.compute
    if shape.parameters >= _LARGE:
        values["trainer.compute.dtype"] = "auto"
    if Sizes.of(shape, settings).trainer_bytes > _TRAINER_BYTES_MAX:
        lora = lora.model_copy(update={"rank": _LORA_RANK})
        values |= {"trainer.lora.rank": _LORA_RANK, "trainer.compute.dtype": "auto"}
    rate = settings.optimizer.with_rate_for_size(shape.parameters, adapters=bool(lora.rank)).rate
    tokens = pack_tokens(shape, compute, lora, on_cpu=True)
    return {"trainer.optimizer.learning_rate": rate, "trainer.compute.pack_tokens": tokens, **values}
