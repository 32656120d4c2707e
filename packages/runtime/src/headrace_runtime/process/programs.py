"""Programs of users that a service starts, and services that run as filter programs.

A user's program (a gate, a tool, a reward function, an agent, another trainer) gets only the environment variables that
every program needs and those that a setting names. An allowlist cannot leak an unknown secret, in contrast to a list of
secrets. The digest of a program covers its command, the source files in the command, and the local modules that they
import.

A filter program reads events and writes results as lines, without the bus. A line consists of a word, a space and JSON
(`headrace_schemas.programs`). The caller of a filter must read and write concurrently. A filter starts like a
service (`headrace_runtime.main`), with the same settings, and logs to standard error.
"""

from __future__ import annotations

import ast
import asyncio
import hashlib
import json
import os
import sys
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, BinaryIO

from pydantic import Field

VariableName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=256)]
"""Name of an environment variable, for settings that pass variables on."""

_SYSTEM = (
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "COLUMNS", "TZ", "TMPDIR", "TEMP", "TMP",
    "XDG_CACHE_HOME", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "SSL_CERT_FILE", "SSL_CERT_DIR",
)  # fmt: skip
_LANGUAGE = (
    "LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE", "LC_COLLATE", "LC_MESSAGES", "LC_MONETARY", "LC_NUMERIC", "LC_TIME",
)  # fmt: skip
_PYTHON = (
    "PYTHONPATH", "PYTHONHOME", "PYTHONUTF8", "PYTHONIOENCODING", "PYTHONUNBUFFERED", "PYTHONHASHSEED",
    "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX", "PYTHONNOUSERSITE", "PYTHONUSERBASE", "PYTHONSAFEPATH",
    "PYTHONWARNINGS", "PYTHONFAULTHANDLER", "PYTHONOPTIMIZE", "PYTHONDEVMODE",
)  # fmt: skip
_COMPUTE = (
    "OMP_NUM_THREADS", "OMP_WAIT_POLICY", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "CUDA_HOME",
    "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "NVIDIA_VISIBLE_DEVICES", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME",
    "NCCL_DEBUG", "NCCL_IB_DISABLE", "NCCL_P2P_DISABLE", "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE",
    "TRANSFORMERS_OFFLINE", "TOKENIZERS_PARALLELISM", "RAY_ADDRESS",
)  # fmt: skip
INHERITED = frozenset((*_SYSTEM, *_LANGUAGE, *_PYTHON, *_COMPUTE))
"""Names of the environment variables that each program of a user inherits."""


def program_environment(
    passed_on: Iterable[str] = (),
    *,
    more: Mapping[str, str] | None = None,
    environ: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Return the environment variables for a program of a user.

    Args:
        passed_on: Names of further variables that the program inherits.
        more: Additional variables with their values.
        environ: The variables from which the program inherits, by default those of this process.
    """
    environ = os.environ if environ is None else environ
    names = INHERITED.union(passed_on)
    return {**{name: value for name, value in environ.items() if name in names}, **(more or {})}


FILES_MAX = 1024
BYTES_MAX = 16 * 1024 * 1024
_SUFFIXES = (".py", ".sh", ".js", ".mjs", ".ts", ".rb", ".pl")
"""Suffixes of files that count as source code. Other files in a command are ignored, because a program may write
them."""


def program_digest(command: Sequence[str], folder: Path | None = None) -> str:
    """Return the SHA-256 of a command and of the source code that it runs in `folder`, by default the current folder.

    Import statements are followed within the folder of a script, and within `folder` for `-m`. For a command without
    source files, the digest covers its words. At most 1,024 files and 16 MiB are included.
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
    """Return the content of the source files of a command, by path relative to `folder`."""
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
            waiting += [file for parts in _imported_modules(content, path, base) for file in _module_files(base, parts)]


def _imported_modules(content: bytes, path: Path, base: Path) -> Iterator[list[str]]:
    """Yield the modules that a Python file imports, each as the parts of its dotted name. Invalid Python yields
    none."""
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
    """Yield the files in `base` that define a module and the packages that contain it."""
    if not all(part.isidentifier() for part in parts):
        return
    for end in range(1, len(parts) + 1):
        stem = base.joinpath(*parts[:end])
        paths = (stem / "__init__.py", stem.with_suffix(".py"), *([stem / "__main__.py"] if main else []))
        yield from (path for path in paths if path.is_file())


_CHUNK_BYTES = 262_144


def line_of(word: str, value: bytes) -> bytes:
    """Encode a line for a filter program: `word`, a space, and the JSON text `value`.

    The word names the kind of the value. `parse_line` is the inverse function.
    """
    return b"%s %s\n" % (word.encode(), value)


def parse_line(line: bytes) -> tuple[str, bytes]:
    """Return the word and the JSON of a line. Raises `ValueError` for a line without a space."""
    word, space, value = line.rstrip(b"\n").partition(b" ")
    if not space:
        raise ValueError(f"line without a space: {line[:40]!r}")
    return word.decode(), value


class Lines:
    """Reader and writer of the lines of a filter program, by default on standard input and standard output."""

    def __init__(self, source: BinaryIO | None = None, target: BinaryIO | None = None) -> None:
        self._source = source or sys.stdin.buffer
        self._target = target or sys.stdout.buffer

    async def read(self) -> AsyncIterator[tuple[str, bytes]]:
        """Yield the two parts of each line until the input ends: the word that names the kind of line, and the JSON.

        Raises `ValueError` as `parse_line` does.
        """
        while chunk := await asyncio.to_thread(self._source.readlines, _CHUNK_BYTES):
            for line in chunk:
                yield parse_line(line)
            self._target.flush()

    def write(self, word: str, value: bytes) -> None:
        """Write a line. Blocks if the process that reads it is slow."""
        self._target.write(line_of(word, value))

    def flush(self) -> None:
        self._target.flush()
