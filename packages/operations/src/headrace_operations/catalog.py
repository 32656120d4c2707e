"""Import and export of versions as folders, their exchange with a hub, and the comparison of two versions."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx2

from headrace.errors import HeadraceError, Unreachable, UsageError
from headrace.registry import ModelRegistry
from headrace.topics import fetch
from headrace_operations.replay.program import start_program
from headrace_operations.supervisor.overrides import Overrides
from headrace_operations.supervisor.plan import data_dir_of
from headrace_runtime.errors import SettingError
from headrace_runtime.storage.base_models import Repository, resolve, translate_hub_errors
from headrace_schemas.http.catalog import RegisterRequest
from headrace_schemas.http.registry_api import ModelState, VersionState
from headrace_schemas.programs import MANIFEST_FILE, FolderLine, MergedLine, MergeLine, StoredLine
from headrace_schemas.values.base import Model
from headrace_schemas.values.blobs import BlobRef, Fingerprint, Manifest

M = TypeVar("M", bound=Model)
_SERVICE = "inference"
_FILTER = "importer"


async def store_folder(folder: Path, name: str | None, base: BlobRef | None, environ: Mapping[str, str]) -> StoredLine:
    """Check the model files in a folder as a replica does when it loads them, and store them as a version.

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
    """Register a stored version, and return the state of its model.

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
    """Fetch the manifest of a version from the blob store.

    Raises:
        HeadraceError: the stored content does not have the digest of the reference.
    """
    return Manifest.model_validate_json(fetch(ref), extra="ignore")


def fetch_file(manifest: Manifest, path: str) -> bytes:
    """Fetch one file of a version from the blob store.

    Raises:
        HeadraceError: the stored content does not have the digest in the manifest.
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
    """Write the files of a version and its manifest into a folder, from which `import` creates the same version again.

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
    """Return the folder of `trainer.base`. A model of the hub is first downloaded into the data directory, which
    blocks.

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
    """Upload all files of a folder to a model hub as one commit. The call blocks.

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
    with translate_hub_errors(repository, "target") as hub:
        api = hub.HfApi()
        api.create_repo(repository.name, private=private, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repository.name, folder_path=folder, revision=repository.revision, commit_message=message
        )
    return str(commit.oid)


_VALUE_LENGTH_MAX = 200
_SCORES = ("score", "difference", "anchor_difference", "tasks")
PROMPTS = (
    "Say hello in one short sentence.",
    "What is 17 + 25? Answer with the number alone.",
    "List three colours, separated by commas.",
    "Summarize in one sentence: The meeting was moved from Monday to Tuesday because the room was taken.",
    "Translate to French: good morning",
    "Is the following friendly or unfriendly? 'Thanks a lot for your help!' Answer with one word.",
    "Write a JSON object with the key name and the value Ada.",
    "I cannot log in to my account. What should I do first?",
)
_TOKENS_MAX = 64
_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Change:
    """A field or file that differs between two versions. A value of None means that the version lacks it."""

    what: str
    """Path of the file or name of the setting."""
    before: str | None
    after: str | None


@dataclass(frozen=True, slots=True)
class LogprobDifference:
    """Absolute differences between two versions' logprobs of the same tokens: number of tokens, mean, maximum."""

    tokens: int
    mean: float
    most: float


def compare_settings(
    before_manifest: Manifest, after_manifest: Manifest, read: Callable[[Manifest, str], bytes]
) -> Iterator[Change]:
    """Yield the differences of kind, base and origin, of files, and of each value in configuration files.

    Args:
        before_manifest: the manifest of the first version.
        after_manifest: the manifest of the second version.
        read: function that returns the content of a version's file at a path.
    """
    for field in ("kind", "base", "lineage", "step", "parent"):
        before, after = (_text(getattr(manifest, field)) for manifest in (before_manifest, after_manifest))
        if before != after:
            yield Change(field, before, after)
    before_files, after_files = (
        {file.path: file.blob for file in manifest.files} for manifest in (before_manifest, after_manifest)
    )
    for path in sorted({*before_files, *after_files}):
        if before_files.get(path) == after_files.get(path):
            continue
        if path not in before_files or path not in after_files:
            yield Change(path, _size(before_files, path), _size(after_files, path))
        elif path.endswith("config.json"):
            yield from _compare_values(path, read(before_manifest, path), read(after_manifest, path))
        else:
            yield Change(path, before_files[path].sha256[:12], after_files[path].sha256[:12])


def compare_scores(before: VersionState, after: VersionState) -> dict[str, tuple[float | None, float | None]]:
    """Return the latest score of each version by name of the score; None for a version without it."""
    before_scores, after_scores = _latest_scores(before), _latest_scores(after)
    return {
        name: (before_scores.get(name), after_scores.get(name))
        for name in _SCORES
        if name in before_scores or name in after_scores
    }


def compare_fingerprints(before: Fingerprint, after: Fingerprint) -> LogprobDifference | None:
    """Compare the logprobs of two versions for the same fixed tokens, or return None if their tokens differ."""
    if before.token_ids != after.token_ids:
        return None
    differences = [abs(a - b) for a, b in zip(before.logprobs, after.logprobs, strict=True)]
    return LogprobDifference(len(differences), math.fsum(differences) / len(differences), max(differences))


def _latest_scores(version: VersionState) -> dict[str, float]:
    statistics: dict[str, float] = {}
    for event in version.decisions:
        statistics |= event.statistics
    return statistics


def _compare_values(path: str, before: bytes, after: bytes) -> Iterator[Change]:
    try:
        before_settings, after_settings = _flatten(json.loads(before)), _flatten(json.loads(after))
    except (ValueError, RecursionError):
        yield Change(path, "not JSON", "not JSON")
        return
    for name in sorted({*before_settings, *after_settings}):
        if before_settings.get(name) != after_settings.get(name):
            yield Change(f"{path}: {name}", before_settings.get(name), after_settings.get(name))


def _flatten(value: Any, name: str = "") -> dict[str, str]:
    """Return the leaf values of nested tables by dotted name; a list is one value."""
    if not isinstance(value, dict):
        return {name: json.dumps(value)[:_VALUE_LENGTH_MAX]}
    return {
        inner: text
        for key, entry in value.items()
        for inner, text in _flatten(entry, f"{name}.{key}" if name else str(key)).items()
    }


def _size(files: Mapping[str, Any], path: str) -> str | None:
    return f"{files[path].size} bytes" if path in files else None


def _text(value: object) -> str | None:
    return None if value is None else str(value)


@dataclass(frozen=True, slots=True)
class AnswerPair:
    """Answers of two versions to one prompt."""

    prompt: str
    before: str
    after: str

    @property
    def equal(self) -> bool:
        return self.before == self.after


def compare_answers(base_url: str, before: str, after: str, key: str | None) -> tuple[AnswerPair, ...]:
    """Request the answers of both versions to all prompts at temperature 0, as evaluation traffic.

    Args:
        base_url: the URL of the gateway with `/v1`.
        before: the first version, `name@digest`.
        after: the second version.
        key: the API key, or None.

    Raises:
        HeadraceError: a version is not served.
        Unreachable: the gateway does not answer.
    """
    headers = {"X-Headrace-Purpose": "eval", **({"Authorization": f"Bearer {key}"} if key else {})}
    try:
        with httpx2.Client(base_url=base_url, headers=headers, timeout=_TIMEOUT_S, trust_env=False) as http:
            return tuple(AnswerPair(text, _answer(http, before, text), _answer(http, after, text)) for text in PROMPTS)
    except httpx2.TransportError as error:
        raise Unreachable(f"{base_url}: {error}") from error


def _answer(http: httpx2.Client, version: str, prompt: str) -> str:
    body = {
        "model": version,
        "messages": [{"role": "user", "content": prompt}],
        "temperature": 0,
        "max_tokens": _TOKENS_MAX,
    }
    answer = http.post("/chat/completions", json=body)
    if answer.status_code != 200:
        raise HeadraceError(f"{version}: does not answer ({answer.text[:300]}); serve it first")
    return str(answer.json()["choices"][0]["message"]["content"] or "")
