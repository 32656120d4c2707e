"""Import of a folder as a version by the program of the inference service, and its registration."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from headrace.errors import HeadraceError
from headrace.registry import ModelRegistry
from headrace_operations.replay.program import start_program
from headrace_schemas.http.catalog import RegisterRequest
from headrace_schemas.http.registry_api import ModelState
from headrace_schemas.programs.models import FolderLine, MergedLine, MergeLine, StoredLine
from headrace_schemas.values.base import Model
from headrace_schemas.values.blobs import BlobRef

M = TypeVar("M", bound=Model)
_SERVICE = "inference"
_FILTER = "importer"


async def store_folder(folder: Path, name: str | None, base: BlobRef | None, environ: Mapping[str, str]) -> StoredLine:
    """Check a folder as a replica would and store it as a version.

    Args:
        folder: absolute path of the model's files.
        name: model name; None takes it from the manifest in the folder.
        base: manifest of the base version, for an adapter.
        environ: environment with the settings of the blob store.

    Raises:
        HeadraceError: the folder is not a valid model.
    """
    line = FolderLine(folder=str(folder), name=name, base=base)
    return await _run_importer("folder", line, StoredLine, environ)


async def merge_adapter(adapter: BlobRef, base: BlobRef, folder: Path, environ: Mapping[str, str]) -> None:
    """Merge an adapter into its base and write the model to `folder`, an absolute path."""
    line = MergeLine(adapter=adapter, base=base, folder=str(folder))
    await _run_importer("merge", line, MergedLine, environ)


def register(api: ModelRegistry, stored_as: StoredLine, *, label: str | None, serve: bool, why: str) -> ModelState:
    """Register a stored version.

    Raises:
        ApiError: the registry refused the version.
    """
    name = stored_as.version.partition("@")[0]
    request = RegisterRequest(manifest=stored_as.manifest, label=label, serve=serve, why=why)
    return api.ask("POST", f"/v1/models/{name}/register", ModelState, request)


async def _run_importer(command: str, line: Model, answer_type: type[M], environ: Mapping[str, str]) -> M:
    async with start_program(_SERVICE, environ, _FILTER) as program:
        await program.feed(command, line.model_dump_json().encode())
        program.close()
        answers = [answer_type.model_validate_json(value) async for _, value in program.lines()]
    if not answers:
        raise HeadraceError(f"the importer of the {_SERVICE} service ended without an answer")
    return answers[0]
