"""Conversion of accelerate configuration files (DDP, DeepSpeed ZeRO) to trainer settings.

Keys without an equivalent setting are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.errors import UsageError
from headrace_operations.arguments import real_number, whole_number
from headrace_operations.trinity_yaml import read
from headrace_schemas.values.text import printable

PRECISIONS = {"no": "float32", "fp32": "float32", "bf16": "bfloat16", "fp16": "auto"}
"""fp16 becomes bfloat16 where the device multiplies it: as fast, and no gradient underflows."""
_ACCEPTED_VALUES = {
    "compute_environment": ("LOCAL_MACHINE",), "distributed_type": ("NO", "MULTI_GPU", "DEEPSPEED"),
    "machine_rank": (0,), "num_machines": (1,), "gpu_ids": ("all", None), "main_training_function": ("main",),
    "rdzv_backend": ("static",),
    "same_network": (True, False), "use_cpu": (False,), "debug": (False,), "downcast_bf16": ("no",),
    "deepspeed_config.offload_optimizer_device": ("none", None),
    "deepspeed_config.offload_param_device": ("none", None),
    "deepspeed_config.zero3_init_flag": (False,),
}  # fmt: skip
"""Accepted keys that need no setting, with the values under which Headrace already behaves the same."""


def settings_of_accelerate(file: str | Path | Mapping[str, Any]) -> dict[str, object]:
    """Convert an accelerate configuration to settings for `attach` or for a settings file.

    Raises:
        UsageError: a key or value has no equivalent setting; the message names all of them.
    """
    table = file if isinstance(file, Mapping) else read(Path(file))
    inner = table.get("deepspeed_config") or {}
    if not isinstance(inner, Mapping):
        raise UsageError(f"deepspeed_config = {printable(repr(inner))}: must be a table")
    keys = {name: value for name, value in table.items() if name != "deepspeed_config"}
    keys |= {f"deepspeed_config.{name}": value for name, value in inner.items()}
    settings: dict[str, object] = {}
    refused = []
    for name, value in keys.items():
        if name in _ACCEPTED_VALUES:
            refused += [] if value in _ACCEPTED_VALUES[name] else [f"{name} = {value!r}"]
        elif (setting := _setting(name, value)) is not None:
            settings |= setting
        else:
            refused.append(f"{printable(str(name))} = {printable(repr(value))}")
    if refused:
        raise UsageError(f"accelerate configuration: no equivalent setting for {'; '.join(refused)}")
    return settings


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
            return {}  # a step always covers the whole batch, however many sequences fit the device at a time
        case "deepspeed_config.zero_stage" if value in (0, 1, 2, 3):
            return {"trainer.ray.shard": "full" if value else "none"}
    return None
