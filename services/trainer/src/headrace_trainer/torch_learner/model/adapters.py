"""LoRA adapters, created with PEFT."""

from __future__ import annotations

from typing import Any

import torch

from headrace_runtime.errors import SettingError
from headrace_trainer.settings import LoraSettings


def add_adapters(model: Any, lora: LoraSettings, seed: int) -> Any:
    """Return `model` with new adapters, which are its only trained weights. Raises `SettingError`."""
    from peft import LoraConfig, get_peft_model  # imported here, because it takes seconds

    config = LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, target_modules=sorted(lora.targets), lora_dropout=0.0, task_type="CAUSAL_LM"
    )
    torch.manual_seed(seed)
    model.name_or_path = None  # the folder is removed before an adapter is saved, so it must not be looked up
    try:
        return get_peft_model(model, config)
    except ValueError as error:
        modules = {name.rpartition(".")[2] for name, module in model.named_modules() if hasattr(module, "weight")}
        remedy = f"{str(error).splitlines()[0]} The model's modules with weights: {', '.join(sorted(modules))}"
        raise SettingError("trainer.lora.targets", ", ".join(lora.targets), remedy) from None
