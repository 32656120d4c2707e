"""Configuration files of accelerate (DDP, DeepSpeed ZeRO) as settings of the trainer. What has no meaning here is
refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.errors import UsageError
from headrace.practice.arguments import real_number, whole_number
from headrace_cli.trinity_yaml.conversion import read
from headrace_schemas.text import printable

PRECISIONS = {"no": "float32", "fp32": "float32", "bf16": "bfloat16", "fp16": "auto"}
"""fp16 becomes bfloat16 where the device multiplies it: as fast, and no gradient underflows."""
_MEANT = {
    "compute_environment": ("LOCAL_MACHINE",), "distributed_type": ("NO", "MULTI_GPU", "DEEPSPEED"),
    "machine_rank": (0,), "num_machines": (1,), "gpu_ids": ("all", None), "main_training_function": ("main",),
    "rdzv_backend": ("static",),
    "same_network": (True, False), "use_cpu": (False,), "debug": (False,), "downcast_bf16": ("no",),
    "deepspeed_config.offload_optimizer_device": ("none", None),
    "deepspeed_config.offload_param_device": ("none", None),
    "deepspeed_config.zero3_init_flag": (False,),
}  # fmt: skip
"""Keys with the values that mean what Headrace does anyhow."""


def settings_of_accelerate(file: str | Path | Mapping[str, Any]) -> dict[str, object]:
    """Settings for `attach`, or for a settings file. Raises `UsageError` that names each key without a meaning here."""
    table = file if isinstance(file, Mapping) else read(Path(file))
    inner = table.get("deepspeed_config") or {}
    if not isinstance(inner, Mapping):
        raise UsageError(f"deepspeed_config = {printable(repr(inner))}: must be a table")
    keys = {**{name: one for name, one in table.items() if name != "deepspeed_config"}}
    keys |= {f"deepspeed_config.{name}": one for name, one in inner.items()}
    found: dict[str, object] = {}
    refused = []
    for name, value in keys.items():
        if name in _MEANT:
            refused += [] if value in _MEANT[name] else [f"{name} = {value!r}"]
        elif (made := _setting(name, value)) is not None:
            found |= made
        else:
            refused.append(f"{printable(str(name))} = {printable(repr(value))}")
    if refused:
        raise UsageError(f"of accelerate's file, these have no meaning here: {'; '.join(refused)}")
    return found


def _setting(name: str, value: Any) -> dict[str, object] | None:
    match name:
        case "num_processes":
            ranks = whole_number("num_processes", value)
            return {"trainer.backend": "ray", "trainer.ray.ranks": ranks} if ranks > 1 else {}
        case "mixed_precision" if value in PRECISIONS:
            return {"trainer.compute.dtype": PRECISIONS[value]}
        case "deepspeed_config.gradient_clipping":
            return {"trainer.optimizer.gradient_norm_max": real_number("gradient_clipping", value)}
        case "deepspeed_config.gradient_accumulation_steps":
            return {}  # a step is on the whole batch, whatever fits a device at a time
        case "deepspeed_config.zero_stage" if value in (0, 1, 2, 3):
            return {"trainer.ray.shard": "full" if value else "none"}
    return None
