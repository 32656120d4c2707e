"""Whether a folder is an adapter of the base that was named, as far as files can tell."""

from __future__ import annotations

import json
import re
from pathlib import Path

from headrace_inference.errors import VersionUnusable
from headrace_runtime import versions
from headrace_schemas.manifest import Manifest
from headrace_schemas.user_text import read_user_text

CONFIG = "adapter_config.json"
_VERSION = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}@[0-9a-f]{12,64}$")


def is_adapter(folder: Path) -> bool:
    return (folder / CONFIG).exists()


def check(folder: Path, base: Path, manifest: Manifest) -> None:
    """Raises `VersionUnusable` for an adapter that names another base, or brings another tokenizer or template."""
    try:
        config = json.loads(read_user_text(folder / CONFIG))
        named = str(config.get("base_model_name_or_path") or "")
    except (ValueError, AttributeError, RecursionError) as error:
        raise VersionUnusable(f"{folder / CONFIG} cannot be read: {error}") from None
    if manifest.kind != "full":
        raise VersionUnusable(f"{manifest.version} is an adapter itself; name the version that it applies to")
    if _VERSION.match(named) and named != manifest.version:
        raise VersionUnusable(f"{folder} is an adapter of {named}, not of {manifest.version}")
    own = folder / versions.TOKENIZER_FILE
    if own.exists() and versions.file_digest(own) != manifest.tokenizer_sha256:
        raise VersionUnusable(f"{folder}: its {versions.TOKENIZER_FILE} is not that of its base {manifest.version}")
    if _has_templates(folder) and versions.template_digest(folder) != versions.template_digest(base):
        raise VersionUnusable(f"{folder}: its chat template is not that of its base {manifest.version}")


def _has_templates(folder: Path) -> bool:
    return any(folder.glob("*.jinja")) or "chat_template" in _text(folder / "tokenizer_config.json")


def _text(path: Path) -> str:
    return read_user_text(path) if path.exists() else ""
