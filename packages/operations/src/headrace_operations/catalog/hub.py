"""Models of a hub: the folder of a base that is named, and the upload of a version."""

from __future__ import annotations

from pathlib import Path

from headrace.errors import UsageError
from headrace_operations.supervisor.overrides import Overrides
from headrace_operations.supervisor.plan import data_dir_of
from headrace_runtime.errors import SettingError
from headrace_runtime.storage.base_models import Repository, hub_errors, resolve


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
