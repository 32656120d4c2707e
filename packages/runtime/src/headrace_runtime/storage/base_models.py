"""Base models by name: a folder, a file (`base_files`), or a repository of a model hub that is downloaded once.

A repository is named as `org/name` or `org/name@revision`. Its files are stored in `models/<org>--<name>/<commit>` of
the data directory, together with the file `headrace_origin.json`, which names repository and commit. Versions contain
that file, so a lineage records where its base came from. The commit of a branch is written down as well. Later starts
use the same commit and need no connection, until `fetch` asks the hub again.

huggingface_hub makes the connection and reads `HF_ENDPOINT`, `HF_TOKEN` and the other variables of that library.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from headrace_runtime.errors import SettingError, Unavailable
from headrace_runtime.process import liveness
from headrace_runtime.process.logs import get_logger
from headrace_runtime.storage import base_files, disk
from headrace_runtime.storage.base_files import ORIGIN_FILE, SETTING
from headrace_runtime.storage.blobs import digest_of
from headrace_runtime.storage.disk import replace_file
from headrace_runtime.storage.versions import FILE_PATTERNS
from headrace_schemas.values.text import printable

log = get_logger(__name__)
FORMS = (
    "name a folder in Hugging Face's layout, a GGUF file, a file of an installed package as package:NAME/PATH, or a "
    "model of the hub as org/name or org/name@revision"
)
_PART = r"[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,94}[A-Za-z0-9_])?"
_NAME = re.compile(rf"(?P<repository>{_PART}/{_PART})(?:@(?P<revision>[\w./-]{{1,200}}))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_INDEX = "model.safetensors.index.json"
_WEIGHTS = "model.safetensors"
_DEFAULT_BRANCH = "main"
_BRANCHES = "branches.json"
_ERROR_LENGTH = 300
_REFUSED_STATUSES = (401, 403)


@dataclass(frozen=True, slots=True)
class Repository:
    """Name of a repository on the hub, with a branch, a tag or a commit."""

    name: str
    revision: str = _DEFAULT_BRANCH

    def __str__(self) -> str:
        return self.name if self.revision == _DEFAULT_BRANCH else f"{self.name}@{self.revision}"

    @classmethod
    def parse(cls, text: str) -> Repository | None:
        """Parse a text such as `owner/model` or `owner/model@revision`. Return None for a text of another form, for
        example a path."""
        match = _NAME.fullmatch(text)
        if match is None or ".." in text or "--" in match["repository"]:
            return None
        return cls(match["repository"], match["revision"] or _DEFAULT_BRANCH)


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """File of a repository. `sha256` is None for small files, for which the hub publishes no digest."""

    path: str
    size: int
    sha256: str | None = None


@dataclass(frozen=True, slots=True)
class RemoteModel:
    """Files of one commit of a repository that belong to a model."""

    repository: Repository
    commit: str
    files: tuple[RemoteFile, ...]

    @property
    def size(self) -> int:
        """Size of all files in bytes."""
        return sum(file.size for file in self.files)


def resolve(base: str, data_dir: Path) -> Path:
    """Return the folder of a base model. A file is converted, and a model of the hub is downloaded, if that was not
    done before. Blocks.

    An existing folder has precedence over a model of the hub.

    Raises:
        SettingError: `base` has an unknown form, does not exist, or cannot be used.
        Unavailable: the hub does not respond, and the model was not downloaded before.
    """
    if Path(base).is_dir():
        return Path(base)
    if (path := base_files.find_file(base)) is not None:
        return path if path.is_dir() else base_files.convert(base, path, data_dir)
    repository = Repository.parse(base)
    if repository is None:
        raise SettingError(SETTING, base, f"is not a folder; {FORMS}")
    if (folder := find_fetched(repository, data_dir)) is not None:
        return folder
    model = describe(repository)
    log.info("fetching_base", base=base, commit=model.commit, files=len(model.files), megabytes=model.size // 1_000_000)
    return fetch(model, data_dir)


def find_fetched(repository: Repository, data_dir: Path) -> Path | None:
    """Return the folder of a model that was downloaded from the hub earlier, or None."""
    folder = _folder_of(repository, data_dir)
    commit = repository.revision
    if not _COMMIT.fullmatch(commit):
        commit = _read_branches(folder).get(commit, "")
    return folder / commit if commit and (folder / commit / ORIGIN_FILE).is_file() else None


def describe(repository: Repository) -> RemoteModel:
    """Request the commit and the list of files of a model from the hub. Blocks.

    Raises:
        SettingError: the hub has no such model, no commit of it, or no weights in safetensors.
        Unavailable: the hub does not answer.
    """
    with translate_hub_errors(repository) as hub:
        info = hub.HfApi().model_info(repository.name, revision=repository.revision, files_metadata=True)
    files = {
        entry.rfilename: RemoteFile(entry.rfilename, entry.size or 0, entry.lfs.sha256 if entry.lfs else None)
        for entry in info.siblings or ()
    }
    names = [name for name in files if _belongs_to_a_model(name)]
    if not any(name.endswith(".safetensors") for name in names):
        raise SettingError(SETTING, str(repository), "has no weights in safetensors; convert the model first")
    if _INDEX not in names and _WEIGHTS in names:  # other files contain the same weights in another layout
        names = [name for name in names if name == _WEIGHTS or not name.endswith(".safetensors")]
    if not _COMMIT.fullmatch(str(info.sha)):  # it becomes the name of a folder
        commit = printable(str(info.sha), 80)
        raise SettingError(SETTING, str(repository), f"the hub answers with the commit {commit!r}; check HF_ENDPOINT")
    return RemoteModel(repository, str(info.sha), tuple(files[name] for name in sorted(names)))


def fetch(model: RemoteModel, data_dir: Path) -> Path:
    """Download a model into the data directory, unless this commit was downloaded before. Return its folder. Blocks.

    An interrupted download continues where it ended.

    Args:
        model: the model, as `describe` returns it.
        data_dir: the data directory.

    Raises:
        SettingError: a file differs from its digest, or the index of the weights cannot be read.
        Unavailable: the hub does not answer, or the disk has too little space.
    """
    folder = _folder_of(model.repository, data_dir)
    final, draft = folder / model.commit, folder / f".{model.commit}.draft"
    if not (final / ORIGIN_FILE).is_file():
        draft.mkdir(parents=True, exist_ok=True)
        disk.check_room(draft, model.size)
        for file in _files_in_index(model, draft):
            _download(model, file, draft)
            liveness.progress()
        shutil.rmtree(draft / ".cache", ignore_errors=True)  # the library's notes on the download
        if not (draft / ORIGIN_FILE).exists():  # a pushed version keeps its own, which its manifest lists
            origin = {"repository": model.repository.name, "commit": model.commit}
            (draft / ORIGIN_FILE).write_text(json.dumps(origin) + "\n", encoding="utf-8")
        shutil.rmtree(final, ignore_errors=True)
        draft.replace(final)
    if not _COMMIT.fullmatch(model.repository.revision):
        branches = {**_read_branches(folder), model.repository.revision: model.commit}
        replace_file(folder / _BRANCHES, json.dumps(branches, indent=2).encode() + b"\n")
    return final


def _files_in_index(model: RemoteModel, draft: Path) -> Iterator[RemoteFile]:
    """Yield the files of the model to download. If it has an index of weights, only weights that the index names are
    included."""
    index = next((file for file in model.files if file.path == _INDEX), None)
    shards: set[str] | None = None
    if index is not None:
        yield index
        shards = _shards_of(draft / _INDEX, model.repository)
        if missing := sorted(shards - {file.path for file in model.files}):
            name = printable(missing[0], _ERROR_LENGTH)
            raise SettingError(SETTING, str(model.repository), f"its index names {name}, which the repository lacks")
    for file in model.files:
        if file.path != _INDEX and (shards is None or file.path in shards or not file.path.endswith(".safetensors")):
            yield file


def _shards_of(index: Path, repository: Repository) -> set[str]:
    try:
        shards = list(json.loads(index.read_bytes())["weight_map"].values())
        if not shards or not all(isinstance(shard, str) for shard in shards):
            raise ValueError
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        remedy = f"{_INDEX} does not map weights to files; name another revision"
        raise SettingError(SETTING, str(repository), remedy) from None
    return set(shards)


def _download(model: RemoteModel, file: RemoteFile, draft: Path) -> None:
    with translate_hub_errors(model.repository) as hub:
        hub.hf_hub_download(model.repository.name, file.path, revision=model.commit, local_dir=draft)
    if file.sha256 is not None and digest_of(draft / file.path)[0] != file.sha256:
        (draft / file.path).unlink()
        raise SettingError(SETTING, str(model.repository), f"{file.path} differs from its digest; fetch it again")


@contextmanager
def translate_hub_errors(repository: Repository, setting: str = SETTING) -> Iterator[Any]:
    """Yield the module huggingface_hub. Convert its errors inside the context to a `SettingError` about `setting`, or
    to `Unavailable`."""
    name = str(repository)
    try:
        import huggingface_hub as hub
        from httpx import HTTPError
        from huggingface_hub import errors
    except ImportError:
        remedy = "models of the hub need the package huggingface_hub; install headrace[local], or name a folder"
        raise SettingError(setting, name, remedy) from None
    try:
        yield hub
    except errors.GatedRepoError:
        remedy = "is gated on the hub; accept its licence there, and set HF_TOKEN to a token of that account"
        raise SettingError(setting, name, remedy) from None
    except errors.RevisionNotFoundError:
        remedy = f"the hub has the model, but no revision {repository.revision!r}; name a branch, a tag or a commit"
        raise SettingError(setting, name, remedy) from None
    except errors.RepositoryNotFoundError:
        remedy = f"is neither a folder nor a model of the hub; {FORMS}, and set HF_TOKEN for a private model"
        raise SettingError(setting, name, remedy) from None
    except (errors.OfflineModeIsEnabled, HTTPError, OSError) as error:
        if disk.is_full(error):
            raise
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status in _REFUSED_STATUSES:
            remedy = f"the hub refuses the token (HTTP {status}); set HF_TOKEN to a token with the needed rights"
            raise SettingError(setting, name, remedy) from None
        reason = printable(str(error), _ERROR_LENGTH)
        raise Unavailable(
            f"setting {setting} = {name!r}: is not a folder, and the hub does not answer: {reason}; check the "
            f"connection and HF_ENDPOINT, or {FORMS}"
        ) from error


def _belongs_to_a_model(path: str) -> bool:
    pure = PurePosixPath(path)
    return any(pattern.count("/") == path.count("/") and pure.match(pattern) for pattern in FILE_PATTERNS)


def _folder_of(repository: Repository, data_dir: Path) -> Path:
    return data_dir / "models" / repository.name.replace("/", "--")


def _read_branches(folder: Path) -> Mapping[str, str]:
    try:
        content = json.loads((folder / _BRANCHES).read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return {
        branch: commit
        for branch, commit in (content.items() if isinstance(content, dict) else ())
        if isinstance(commit, str) and _COMMIT.fullmatch(commit)
    }
