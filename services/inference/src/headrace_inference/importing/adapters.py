"""Check of whether a folder is an adapter of a base, as far as its files show."""

from __future__ import annotations

import json
import re
from pathlib import Path

from headrace_inference.errors import VersionUnusable
from headrace_runtime.storage import versions
from headrace_schemas.values.blobs import Manifest
from headrace_schemas.values.text import read_user_text

CONFIG = "adapter_config.json"
_VERSION = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}@[0-9a-f]{12,64}$")


def is_adapter(folder: Path) -> bool:
    """Return whether the folder contains an adapter."""
    return (folder / CONFIG).exists()


def check(folder: Path, base: Path, manifest: Manifest) -> None:
    """Raise `VersionUnusable` if the adapter names another base, or contains another tokenizer or chat template.

    Args:
        base: folder of the base.
        manifest: manifest of the base.
    """
    try:
        config = json.loads(read_user_text(folder / CONFIG))
        base_name = str(config.get("base_model_name_or_path") or "")
    except (ValueError, AttributeError, RecursionError) as error:
        raise VersionUnusable(f"{folder / CONFIG} cannot be read: {error}") from None
    if manifest.kind != "full":
        raise VersionUnusable(f"{manifest.version} is an adapter itself; name the version that it applies to")
    if _VERSION.match(base_name) and base_name != manifest.version:
        raise VersionUnusable(f"{folder} is an adapter of {base_name}, not of {manifest.version}")
    tokenizer = folder / versions.TOKENIZER_FILE
    if tokenizer.exists() and versions.file_digest(tokenizer) != manifest.tokenizer_sha256:
        raise VersionUnusable(f"{folder}: its {versions.TOKENIZER_FILE} is not that of its base {manifest.version}")
    if _has_templates(folder) and versions.template_digest(folder) != versions.template_digest(base):
        raise VersionUnusable(f"{folder}: its chat template is not that of its base {manifest.version}")


def _has_templates(folder: Path) -> bool:
    return any(folder.glob("*.jinja")) or "chat_template" in _text(folder / "tokenizer_config.json")


def _text(path: Path) -> str:
    return read_user_text(path) if path.exists() else ""
