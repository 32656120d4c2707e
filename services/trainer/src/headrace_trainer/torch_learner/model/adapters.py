"""LoRA adapters, as PEFT makes them."""

from __future__ import annotations

from typing import Any

import torch

from headrace_runtime.errors import SettingError
from headrace_trainer.settings import LoraSettings


def on(model: Any, lora: LoraSettings, seed: int) -> Any:
    """`model` with new ones, which are all that is trained. Raises `SettingError`."""
    from peft import LoraConfig, get_peft_model  # seconds that full training need not wait

    config = LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, target_modules=sorted(lora.targets), lora_dropout=0.0, task_type="CAUSAL_LM"
    )
    torch.manual_seed(seed)
    model.name_or_path = None  # the folder is gone by the time an adapter is saved; nobody shall look for it
    try:
        return get_peft_model(model, config)
    except ValueError as error:
        raise SettingError("trainer.lora.targets", lora.targets, str(error).splitlines()[0]) from None
