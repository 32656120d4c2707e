"""Has the inference service's own program make a version of a folder, and tells the registry of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from headrace.errors import HeadraceError
from headrace.registry import ModelRegistry
from headrace_operations.replay.program import started
from headrace_schemas.base import Model
from headrace_schemas.blobs import BlobRef
from headrace_schemas.catalog import RegisterRequest
from headrace_schemas.importing import FolderLine, MergedLine, MergeLine, StoredLine
from headrace_schemas.registry_api import ModelState

M = TypeVar("M", bound=Model)
_SERVICE = "inference"
_FILTER = "importer"


async def stored(folder: Path, name: str | None, base: BlobRef | None, environ: Mapping[str, str]) -> StoredLine:
    """An absolute folder in the blob store, checked as a replica would. Raises `HeadraceError` with what is wrong."""
    line = FolderLine(folder=str(folder), name=name, base=base)
    return await _asked("folder", line, StoredLine, environ)


async def merged(adapter: BlobRef, base: BlobRef, folder: Path, environ: Mapping[str, str]) -> None:
    """Adapter and base as one model in `folder`, which is absolute."""
    line = MergeLine(adapter=adapter, base=base, folder=str(folder))
    await _asked("merge", line, MergedLine, environ)


def register(api: ModelRegistry, stored_as: StoredLine, *, label: str | None, serve: bool, why: str) -> ModelState:
    """Tell the registry. Raises `ApiError` with its reason."""
    name = stored_as.version.partition("@")[0]
    request = RegisterRequest(manifest=stored_as.manifest, label=label, serve=serve, why=why)
    return api.ask("POST", f"/v1/models/{name}/register", ModelState, request)


async def _asked(word: str, line: Model, answer: type[M], environ: Mapping[str, str]) -> M:
    async with started(_SERVICE, environ, _FILTER) as program:
        await program.feed(word, line.model_dump_json().encode())
        program.close()
        found = [answer.model_validate_json(value) async for _, value in program.lines()]
    if not found:
        raise HeadraceError(f"the {_SERVICE} program ended without an answer")
    return found[0]
