"""Reads a model's configuration from its folder, without its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoConfig

from headrace_runtime.errors import SettingError


def config_of(folder: Path) -> Any:
    """Return the configuration of the model in `folder`. Raises `SettingError`."""
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise SettingError("trainer.base", str(folder), f"has no configuration to use: {first_line(error)}") from None


def architecture_of(config: Any) -> str:
    """Return the name of the model's class from its configuration."""
    return str((config.architectures or [type(config).__name__])[0])


def first_line(error: BaseException) -> str:
    """Return the first line of a library's error message."""
    return (str(error).splitlines() or [""])[0] or type(error).__name__
