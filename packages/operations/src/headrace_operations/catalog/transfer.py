"""Import and export of versions as folders, and their exchange with a hub."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from headrace.errors import HeadraceError, UsageError
from headrace.registry import ModelRegistry
from headrace.topics import fetch
from headrace_operations.replay.program import start_program
from headrace_operations.supervisor.overrides import Overrides
from headrace_operations.supervisor.plan import data_dir_of
from headrace_runtime.errors import SettingError
from headrace_runtime.storage.base_models import Repository, hub_errors, resolve
from headrace_schemas.http.catalog import RegisterRequest
from headrace_schemas.http.registry_api import ModelState
from headrace_schemas.programs.models import MANIFEST_FILE, FolderLine, MergedLine, MergeLine, StoredLine
from headrace_schemas.values.base import Model
from headrace_schemas.values.blobs import BlobRef, Manifest

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


def fetch_manifest(ref: BlobRef) -> Manifest:
    """Fetch a manifest.

    Raises:
        HeadraceError: the digest of the blob differs.
    """
    return Manifest.model_validate_json(fetch(ref), extra="ignore")


def fetch_file(manifest: Manifest, path: str) -> bytes:
    """Fetch one file of a version.

    Raises:
        HeadraceError: the digest of the file differs.
    """
    return fetch(next(file.blob for file in manifest.files if file.path == path))


def check_empty(folder: Path) -> None:
    """Check that the folder is empty or missing, because other files in it would become part of the model.

    Raises:
        UsageError: the folder is not empty.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder}: is not empty; name a new folder")


def export(manifest: Manifest, folder: Path) -> int:
    """Write the files of the version and its manifest, from which `import` creates the same version again.

    Returns:
        The size of the files in bytes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    size_bytes = 0
    for file in manifest.files:
        path = folder / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        size_bytes += path.write_bytes(fetch(file.blob))
    (folder / MANIFEST_FILE).write_bytes(manifest.canonical_json())
    return size_bytes


def base_folder(overrides: Overrides) -> Path:
    """Return the folder of `trainer.base`. A model of the hub is fetched into the data directory first. Blocks.

    Raises:
        UsageError: neither a folder nor a model of the hub has this name.
        Unavailable: the hub does not answer.
    """
    base = str(overrides.get("trainer.base") or "")
    try:
        return resolve(base, data_dir_of(None, overrides)).absolute()
    except SettingError as error:
        raise UsageError(str(error)) from None


def push(folder: Path, target: str, *, message: str, private: bool) -> str:
    """Upload all files of a folder as one commit. Blocks.

    Args:
        folder: folder of the version's files.
        target: name of the model, `org/name` or `org/name@branch`; it is created if missing.
        message: message of the commit.
        private: whether a new model is private.

    Returns:
        The commit.

    Raises:
        SettingError: the name has another form, or the hub refuses the token.
        Unavailable: the hub does not answer.
    """
    repository = Repository.parse(target)
    if repository is None:
        raise SettingError("target", target, "must be org/name or org/name@branch")
    with hub_errors(repository, "target") as hub:
        api = hub.HfApi()
        api.create_repo(repository.name, private=private, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repository.name, folder_path=folder, revision=repository.revision, commit_message=message
        )
    return str(commit.oid)
