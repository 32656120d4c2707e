"""Description of a job, the digest by which two jobs are compared, and the journal of its finished parts.

The journal is the file `jobs/<lineage>.json`. A job that was killed resumes after the last part in its journal.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Self

from pydantic import Field

from headrace.errors import UsageError
from headrace_operations.catalog import base_folder
from headrace_operations.jobs.sources import RowFile, find_files
from headrace_operations.supervisor.overrides import Overrides
from headrace_operations.supervisor.plan import data_dir_of
from headrace_runtime.registries import PluginError, Registry
from headrace_runtime.storage import disk, versions
from headrace_schemas.values.base import Model, Sha256, Timestamp, Version
from headrace_schemas.values.blobs import BlobRef

ALGORITHMS: Registry[object] = Registry("algorithms", object, "algorithm")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_INVALID_NAME_CHARACTERS = re.compile(r"[^A-Za-z0-9._-]+")
_LOCATION_SETTINGS = frozenset({"base", "lineage", "topic", "port"})
"""Trainer settings that do not change the result of a job, only its location."""
Paths = str | Path | Sequence[str | Path]


@dataclass(frozen=True)
class RowOptions:
    """Options for reading the rows of files."""

    columns: Mapping[str, str] = field(default_factory=dict)
    """Column name of the format to column name of the files."""
    form: str | None = None
    """Name of the row format; None selects it for each row by its columns."""
    split: str | None = None
    """Split of a folder that has several."""
    ignored: frozenset[str] = frozenset()
    """Fields of messages to ignore."""
    keep_duplicates: bool = False
    skip_bad: int = 0
    """Maximum number of invalid rows that are skipped; with more of them the job is refused."""
    held_out: tuple[Path, ...] = ()
    """Files of held-out tasks that no row may contain."""
    gate_tasks: bool = True
    """Whether rows must not contain the tasks of the configured gate either."""


@dataclass(frozen=True)
class Job:
    """An offline training: rows of files, an algorithm of the trainer, and the resulting lineage.

    The same job with the same lineage name resumes; another job with that name is refused.
    """

    kind: str
    """Name of the algorithm plug-in: `sft`, `dpo`, ..."""
    source: Paths
    """Files or folders; see `headrace_operations.jobs.sources`."""
    base: str | Path | None = None
    """A Hugging Face folder, or a model of the hub as `org/name`; None takes the setting `trainer.base`."""
    lineage: str | None = None
    """Name of the lineage; None builds it from the algorithm, the first source and a digest of the job."""
    settings: Mapping[str, object] = field(default_factory=dict)
    """Settings by dotted name; they override those of the file `config` and of the environment."""
    epochs: int = 1
    shuffle: bool = True
    """Whether each epoch has its own random order, derived from `seed`; otherwise the order of the files."""
    seed: int = 0
    rows: RowOptions = field(default_factory=RowOptions)
    config: Path | None = None
    bus: str | None = None
    data_dir: Path | None = None
    offer: bool = False
    """Announce the last version to the registry, which then probes and evaluates it."""

    @property
    def sources(self) -> tuple[Path, ...]:
        if isinstance(self.source, str | Path):
            return (Path(self.source),)
        return tuple(map(Path, self.source))


@dataclass(frozen=True)
class PreparedJob:
    """A checked job, with its resolved settings, files, digest, lineage and model. `prepare` creates it."""

    job: Job
    overrides: Overrides
    base: Path
    files: tuple[RowFile, ...]
    digest: str
    """Digest of everything that determines the result but the weights of the base, which the trainer compares
    itself."""
    lineage: str
    model: str
    data_dir: Path

    def file_path(self, suffix: str) -> Path:
        """Return the path of one of the job's files in the data directory."""
        return self.data_dir / "jobs" / f"{self.lineage}{suffix}"


def prepare(job: Job, environ: Mapping[str, str] | None = None) -> PreparedJob:
    """Check a job and resolve its settings and files, without starting any program.

    Raises:
        UsageError: a value is invalid; the message names the value and a remedy.
    """
    try:
        ALGORITHMS.point(job.kind)
    except PluginError as error:
        raise UsageError(str(error)) from None
    if job.epochs < 1:
        raise UsageError(f"epochs = {job.epochs}: must be at least 1")
    overrides = Overrides(job.config, job.settings, os.environ if environ is None else environ)
    if job.base is not None:
        overrides.set("trainer.base", str(job.base))
    data_dir = data_dir_of(job.data_dir, overrides)
    overrides.set("data_dir", data_dir)
    base = _base(overrides)
    overrides.set("trainer.base", str(base))
    overrides.set("trainer.algorithm", job.kind)
    for name in ("trainer.advantage.kind", "trainer.loss.kind"):
        if name not in job.settings:
            overrides.set(name, "")  # the settings file configures the algorithm of the live lineage, not this one
    overrides.default(
        "trainer.batch_experiences_min", 1
    )  # no more rows will come, so train an incomplete batch as well
    files = tuple(file for source in job.sources for file in find_files(source, job.rows.split))
    digest = _digest(job, overrides, base, files)
    lineage = (
        job.lineage or f"{_name_part(job.kind)}-{_name_part(job.sources[0].stem if job.sources else '')}-{digest[:8]}"
    )
    live = str(overrides.get("trainer.lineage") or "main")
    if not _NAME.fullmatch(lineage):
        raise UsageError(
            f"lineage = {lineage!r}: must have 1 to 100 letters, digits, dots, underscores and hyphens, "
            "and begin with a letter or digit"
        )
    if lineage == live:
        raise UsageError(f"lineage = {lineage!r}: is the live lineage; choose another name for the job")
    model = str(overrides.get("trainer.model") or "headrace")
    return PreparedJob(job, overrides, base, files, digest, lineage, model, data_dir)


def _base(overrides: Overrides) -> Path:
    if not overrides.get("trainer.base"):
        raise UsageError(
            "trainer.base is not set: name a folder or a model of the hub with --base, or set it in a settings file "
            "(--config)"
        )
    return base_folder(overrides)


def _digest(job: Job, overrides: Overrides, base: Path, files: Sequence[RowFile]) -> str:
    """Return a digest by which two jobs with equal results are recognized.

    It covers the contents and the order of files, but not their names and locations.
    """
    configuration = {path.name: versions.file_digest(path) for path in _configuration_files(base)}
    held_out = [versions.file_digest(path) for path in job.rows.held_out]
    trainer = {
        name: value for name, value in (overrides.get("trainer") or {}).items() if name not in _LOCATION_SETTINGS
    }
    parts: list[Any] = [
        job.kind, [file.sha256 for file in files], configuration, job.epochs, job.shuffle, job.seed,
        dict(job.rows.columns), job.rows.form, sorted(job.rows.ignored), job.rows.keep_duplicates, job.rows.skip_bad,
        held_out, trainer, overrides.get("inference.tool_parser"), overrides.get("inference.reasoning_parser"),
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def _configuration_files(base: Path) -> list[Path]:
    return [path for path in versions.model_files(base) if not versions.is_weights(path.name)]


def _name_part(name: str) -> str:
    """Return the part of `name` that is valid in the name of a lineage."""
    return _INVALID_NAME_CHARACTERS.sub("-", name).strip("-.")[:40] or "rows"


class JobJournal(Model):
    """Progress of an offline training job, stored as a file, so that an interrupted job continues where it stopped.

    The fields of a part of the job keep their defaults until the part is finished.
    """

    digest: Sha256
    kind: str
    model: str
    begun: Timestamp
    rows: int | None = None
    """Number of rows that can be trained; the file of rows is stored with the journal."""
    skipped: int = 0
    base: Version | None = None
    """First version of the lineage."""
    base_manifest: BlobRef | None = None
    experiences: int | None = None
    """Number of experiences, all of which are on the topic."""
    version: Version | None = None
    """Last version of the lineage; the job is finished."""
    manifest: BlobRef | None = None
    trained: int = 0
    dropped: dict[str, int] = Field(default_factory=dict)
    waiting: int = 0
    batches: tuple[Sha256, ...] = ()
    """Digests of the trained batches, in order."""

    @classmethod
    def read(cls, path: Path) -> Self | None:
        return cls.model_validate_json(path.read_bytes()) if path.exists() else None

    @classmethod
    def begin(cls, prepared: PreparedJob, now: datetime) -> Self:
        """Return the journal of this job from its file, or a new journal.

        Raises:
            UsageError: the lineage is that of another job.
        """
        path = prepared.file_path(".json")
        journal = cls.read(path)
        if journal is None or (journal.digest != prepared.digest and journal.base is None):  # no lineage was started
            journal = cls(digest=prepared.digest, kind=prepared.job.kind, model=prepared.model, begun=now)
            journal.write(path)
        elif journal.digest != prepared.digest:
            raise UsageError(
                f"lineage = {prepared.lineage!r}: belongs to a job with other rows, options or settings; "
                "choose another name with --lineage"
            )
        return journal

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        disk.replace_file(path, self.model_dump_json(indent=1).encode())

    def record(self, path: Path, **fields: object) -> Self:
        """Write the journal with changed fields durably to `path`, and return it."""
        journal = self.model_copy(update=fields)
        journal.write(path)
        return journal


@contextlib.contextmanager
def lock_job(prepared: PreparedJob) -> Iterator[None]:
    """Lock the job, so that one process at a time works on it.

    Raises:
        UsageError: another process has the lock.
    """
    path = prepared.file_path(".lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"lineage {prepared.lineage!r}: another process works on it in {prepared.data_dir}"
            ) from None
        yield
