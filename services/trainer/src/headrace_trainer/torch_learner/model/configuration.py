"""Reads a model's configuration from its folder without its weights, and checks its files.

The report of transformers names tensors that are missing, unexpected, of another shape or not finite.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from headrace_runtime.errors import SettingError


def config_of(folder: Path) -> Any:
    """Return the configuration of the model in `folder`, as transformers reads it. Raises `SettingError`."""
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # noqa: BLE001 (a damaged configuration raises any error)
        raise SettingError("trainer.base", str(folder), f"has no configuration to use: {first_line(error)}") from None


def architecture_of(config: Any) -> str:
    """Return the name of the model's class from its configuration."""
    return str((config.architectures or [type(config).__name__])[0])


def first_line(error: BaseException) -> str:
    """Return the first line of a library's error message."""
    return (str(error).splitlines() or [""])[0] or type(error).__name__


_SHOWN = 3


def check_layout(folder: Path) -> None:
    """Raise `SettingError` if names or shapes of the weights are not those of the architecture. It reads no weights."""
    transformers_logging.disable_progress_bar()
    try:
        _, info = AutoModelForCausalLM.from_pretrained(
            folder,
            device_map="meta",
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    except Exception as error:  # noqa: BLE001 (damaged files raise any error)
        remedy = f"is no model that transformers can load: {first_line(error)}"
        raise SettingError("trainer.base", str(folder), remedy) from None
    check_names(folder, info)


def check_names(folder: Path, info: Mapping[str, Any]) -> None:
    """Raise `SettingError` if tensors are missing in the files, unexpected or of another shape.

    Transformers would fill missing tensors with random numbers or ones.

    Args:
        folder: the model folder.
        info: report of transformers (`output_loading_info`).
    """
    wrong = {name.removesuffix("_keys"): sorted(map(str, keys)) for name, keys in info.items() if keys}
    if wrong:
        problems = "; ".join(f"{name}: {', '.join(keys[:_SHOWN])}" for name, keys in sorted(wrong.items()))
        remedy = f"its weights do not fit its architecture ({problems}); copy all files of one model"
        raise SettingError("trainer.base", str(folder), remedy)


def check_weights(folder: Path, model: Any, info: Mapping[str, Any]) -> None:
    """Raise `SettingError` if tensors are not those of the architecture (`check_names`), or not finite."""
    check_names(folder, info)
    for name, parameter in model.named_parameters():
        if not bool(torch.isfinite(parameter).all()):
            remedy = f"its tensor {name} contains NaN or infinity; use the weights of an intact model"
            raise SettingError("trainer.base", str(folder), remedy)
