"""Digest of a user's program: its command, the source files in the command, and the local modules that they import."""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

FILES_MAX = 1024
BYTES_MAX = 16 * 1024 * 1024
_SUFFIXES = (".py", ".sh", ".js", ".mjs", ".ts", ".rb", ".pl")
"""Suffixes of source files. Data and logs in a command are ignored, because a program may write them."""


def program_digest(command: Sequence[str], folder: Path | None = None) -> str:
    """Return the SHA-256 of a command and of the code that it runs in `folder`, by default the current one.

    Import statements are followed within the folder of a script, and within `folder` for `-m`. A command without source
    files has the digest of its words. At most 1,024 files and 16 MiB are included.
    """
    digest = hashlib.sha256(json.dumps(list(command)).encode())
    folder = (folder or Path()).absolute()
    size = 0
    for count, (name, content) in enumerate(sorted(_sources(command, folder).items())):
        size += len(content)
        if count >= FILES_MAX or size > BYTES_MAX:
            break
        digest.update(json.dumps([name, hashlib.sha256(content).hexdigest()]).encode())
    return digest.hexdigest()


def _sources(command: Sequence[str], folder: Path) -> dict[str, bytes]:
    """Return the source files of a command by their paths relative to `folder`."""
    sources: dict[str, bytes] = {}
    before = ""
    for word in command:
        if before == "-m":
            for path in _module_files(folder, word.split("."), main=True):
                _add_source(path, folder, folder, sources)
        elif word.endswith(_SUFFIXES) and "\x00" not in word:
            path = folder / word
            _add_source(path, path.parent, folder, sources)
        before = word
    return sources


def _add_source(path: Path, base: Path, folder: Path, sources: dict[str, bytes]) -> None:
    """Add a file to `sources`, and the modules in `base` that it imports directly or indirectly."""
    waiting = [path]
    while waiting and len(sources) < FILES_MAX:
        path = waiting.pop()
        name = str(path.relative_to(folder)) if path.is_relative_to(folder) else str(path)
        try:
            if name in sources or path.stat().st_size > BYTES_MAX:
                continue
            content = path.read_bytes()
        except OSError:
            continue
        sources[name] = content
        if path.suffix == ".py":
            waiting += [file for parts in _imported(content, path, base) for file in _module_files(base, parts)]


def _imported(content: bytes, path: Path, base: Path) -> Iterator[list[str]]:
    """Yield the modules that a file imports, by the parts of their names. Invalid Python yields no modules."""
    try:
        tree = ast.parse(content)
    except (SyntaxError, ValueError, RecursionError):
        return
    package = list(path.parent.relative_to(base).parts) if path.is_relative_to(base) else []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            module = [*above, *(node.module.split(".") if node.module else [])]
            yield module
            yield from ([*module, alias.name] for alias in node.names)


def _module_files(base: Path, parts: Sequence[str], *, main: bool = False) -> Iterator[Path]:
    """Yield the files in `base` of a module and of the packages that contain it."""
    if not all(part.isidentifier() for part in parts):
        return
    for end in range(1, len(parts) + 1):
        stem = base.joinpath(*parts[:end])
        paths = (stem / "__init__.py", stem.with_suffix(".py"), *([stem / "__main__.py"] if main else []))
        yield from (path for path in paths if path.is_file())
