"""Check of an adapter's folder before vLLM loads it, because vLLM ignores what it does not support."""

from __future__ import annotations

import json
from pathlib import Path

from headrace_inference.errors import VersionUnusable
from headrace_schemas.values.text import read_user_text

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "use_dora": (False,),
    "bias": ("none",),
    "modules_to_save": ((),),
    "trainable_token_indices": ((),),
    "lora_bias": (False,),
    "layer_replication": ((),),
    "target_parameters": ((),),
}
"""Fields of a LoRA configuration that vLLM does not support, with their values when they are not used."""


def check(folder: Path, rank_max: int) -> None:
    """Raise `VersionUnusable` for an adapter that is not LoRA, has a rank above `rank_max`, or is not supported."""
    try:
        config = json.loads(read_user_text(folder / CONFIG))
        kind, rank = config["peft_type"], max([config["r"], *(config.get("rank_pattern") or {}).values()])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise VersionUnusable(f"{CONFIG} cannot be read: {type(error).__name__}: {error}") from None
    if kind != "LORA":
        raise VersionUnusable(f"adapters of type {kind} are not supported; LoRA is")
    if not (folder / WEIGHTS).exists():
        raise VersionUnusable(f"the adapter has no {WEIGHTS}")
    if rank > rank_max:
        raise VersionUnusable(f"the adapter has rank {rank}, inference.vllm.adapter_rank_max allows {rank_max}")
    for name, neutral in _NEUTRAL.items():
        value = config.get(name)
        if value and value not in neutral:
            raise VersionUnusable(f"{CONFIG} sets {name} = {json.dumps(value)[:100]}, which vLLM does not support")
