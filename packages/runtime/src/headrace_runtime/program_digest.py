"""A digest of a user's program: its command, the source files that the command names, and the modules beside them that
these import."""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

FILES_MAX = 1024
BYTES_MAX = 16 * 1024 * 1024
_SUFFIXES = (".py", ".sh", ".js", ".mjs", ".ts", ".rb", ".pl")
"""Files that are code. Data and logs in a command are not looked into: a program may write them."""


def program_digest(command: Sequence[str], folder: Path | None = None) -> str:
    """Return the SHA-256 of a command and of the code that it runs from `folder`, the current one by default.

    Import statements are followed within the folder of a script, and within `folder` for `-m`. A command that names no
    such file has the digest of its words alone. At most 1,024 files and 16 MiB count.
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
    """Return the code by its path, as it is seen from `folder`."""
    kept: dict[str, bytes] = {}
    before = ""
    for word in command:
        if before == "-m":
            for path in _module_files(folder, word.split("."), main=True):
                _keep(path, folder, folder, kept)
        elif word.endswith(_SUFFIXES) and "\x00" not in word:
            path = folder / word
            _keep(path, path.parent, folder, kept)
        before = word
    return kept


def _keep(path: Path, base: Path, folder: Path, kept: dict[str, bytes]) -> None:
    """Keep a file, and the modules in `base` that its import statements name."""
    waiting = [path]
    while waiting and len(kept) < FILES_MAX:
        path = waiting.pop()
        name = str(path.relative_to(folder)) if path.is_relative_to(folder) else str(path)
        try:
            if name in kept or path.stat().st_size > BYTES_MAX:
                continue
            content = path.read_bytes()
        except OSError:
            continue
        kept[name] = content
        if path.suffix == ".py":
            waiting += [file for parts in _imported(content, path, base) for file in _module_files(base, parts)]


def _imported(content: bytes, path: Path, base: Path) -> Iterator[list[str]]:
    """Yield the modules that a file imports, by the parts of their names. Text that is no Python imports nothing."""
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
    """Yield the files of a module and of the packages that it is in, as far as they lie in `base`."""
    if not all(part.isidentifier() for part in parts):
        return
    for end in range(1, len(parts) + 1):
        place = base.joinpath(*parts[:end])
        names = (place / "__init__.py", place.with_suffix(".py"), *([place / "__main__.py"] if main else []))
        yield from (path for path in names if path.is_file())
