"""What a model's folder says of it, without its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoConfig

from headrace_runtime.errors import SettingError


def config_of(folder: Path) -> Any:
    """The configuration of the model in `folder`. Raises `SettingError`."""
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise SettingError("trainer.base", str(folder), f"has no configuration to use: {said(error)}") from None


def architecture_of(config: Any) -> str:
    """The name of the model's class, as its configuration has it."""
    return str((config.architectures or [type(config).__name__])[0])


def said(error: BaseException) -> str:
    """The first line of what a library says, for a sentence of ours."""
    return (str(error).splitlines() or [""])[0] or type(error).__name__
