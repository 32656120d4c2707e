"""What a job is asked to do, and the digest that tells whether two are the same."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.errors import UsageError
from headrace_operations.jobs.sources import RowFile, files_of
from headrace_operations.supervisor.overrides import Overrides
from headrace_operations.supervisor.plan import data_dir_of
from headrace_runtime import versions
from headrace_runtime.registries import PluginError, Registry

ALGORITHMS: Registry[object] = Registry("algorithms", object, "algorithm")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]+")
_PLACES = frozenset({"base", "lineage", "topic", "port"})
"""Settings that say where a job runs, and not what comes of it."""
Paths = str | Path | Sequence[str | Path]


@dataclass(frozen=True)
class RowOptions:
    """How files are read as rows."""

    columns: Mapping[str, str] = field(default_factory=dict)
    """A column as a format calls it, to what it is called in the files."""
    form: str | None = None
    """The name of a format; else each row shows it by its columns."""
    split: str | None = None
    """Of a folder that has several."""
    ignored: frozenset[str] = frozenset()
    """Fields of messages to pass over."""
    keep_duplicates: bool = False
    skip_bad: int = 0
    """Bad rows that may be left out; with one more the job is refused."""
    held_out: tuple[Path, ...] = ()
    """Files of tasks that no row may ask."""
    gate_tasks: bool = True
    """Look for the gate's tasks, too, where a gate is configured."""


@dataclass(frozen=True)
class Job:
    """An offline training: rows of files, an algorithm of the trainer, and the lineage that comes of it.

    The same job under the same name goes on where it was; another one under that name is refused.
    """

    kind: str
    """The algorithm, by the name that it is announced with: `sft`, `dpo`, ..."""
    source: Paths
    """Files or folders; see `sources`."""
    base: str | Path | None = None
    """A Hugging Face folder; None: `trainer.base` of the settings."""
    lineage: str | None = None
    """None: a name made of the algorithm, the first source and a digest of the job."""
    settings: Mapping[str, object] = field(default_factory=dict)
    """By dotted names, over those of the file `config` and of the environment."""
    epochs: int = 1
    shuffle: bool = True
    """Another order in each epoch, which follows from `seed`; else the order of the files."""
    seed: int = 0
    rows: RowOptions = field(default_factory=RowOptions)
    config: Path | None = None
    bus: str | None = None
    data_dir: Path | None = None
    offer: bool = False
    """Tell the registry of the last version, which then probes and gates it."""

    @property
    def sources(self) -> tuple[Path, ...]:
        if isinstance(self.source, str | Path):
            return (Path(self.source),)
        return tuple(map(Path, self.source))


@dataclass(frozen=True)
class PreparedJob:
    """A job with everything that follows from it. `prepare` makes one; nothing has been started."""

    job: Job
    overrides: Overrides
    base: Path
    files: tuple[RowFile, ...]
    digest: str
    """Of all that decides what comes out, the weights of the base apart, which the trainer compares itself."""
    lineage: str
    model: str
    data_dir: Path

    def place(self, suffix: str) -> Path:
        return self.data_dir / "jobs" / f"{self.lineage}{suffix}"


def prepare(job: Job, environ: Mapping[str, str] | None = None) -> PreparedJob:
    """Check what can be checked without starting anything. Raises `UsageError` with the remedy."""
    try:
        ALGORITHMS.point(job.kind)
    except PluginError as error:
        raise UsageError(str(error)) from None
    if job.epochs < 1:
        raise UsageError(f"epochs = {job.epochs}: at least 1")
    overrides = Overrides(job.config, job.settings, os.environ if environ is None else environ)
    if job.base is not None:
        overrides.set("trainer.base", str(job.base))
    base = _base(overrides)
    overrides.set("trainer.base", str(base))
    data_dir = data_dir_of(job.data_dir, overrides)
    overrides.set("data_dir", data_dir)
    overrides.set("trainer.algorithm", job.kind)
    for name in ("trainer.advantage.kind", "trainer.loss.kind"):
        if name not in job.settings:
            overrides.set(name, "")  # what a file says of them is for the algorithm that serves live
    overrides.default("trainer.batch_experiences_min", 1)  # nothing more will come, so no row is left over
    files = tuple(file for source in job.sources for file in files_of(source, job.rows.split))
    digest = _digest(job, overrides, base, files)
    lineage = job.lineage or f"{_word(job.kind)}-{_word(job.sources[0].stem if job.sources else '')}-{digest[:8]}"
    live = str(overrides.get("trainer.lineage") or "main")
    if not _NAME.fullmatch(lineage):
        raise UsageError(f"lineage {lineage!r}: use letters, digits, dots, underscores and hyphens, at most 100")
    if lineage == live:
        raise UsageError(f"lineage {lineage!r} is the one that is trained live; name another one for the job")
    model = str(overrides.get("trainer.model") or "headrace")
    return PreparedJob(job, overrides, base, files, digest, lineage, model, data_dir)


def _base(overrides: Overrides) -> Path:
    given = overrides.get("trainer.base")
    if not given:
        raise UsageError(
            "no base: name a Hugging Face folder with --base, or trainer.base in a settings file (--config)"
        )
    folder = Path(str(given)).absolute()
    if not folder.is_dir():
        raise UsageError(f"the base {folder} is not a folder; name one in Hugging Face's layout")
    return folder


def _digest(job: Job, overrides: Overrides, base: Path, files: Sequence[RowFile]) -> str:
    """Names and places of files do not count; their bytes do, and their order."""
    acting = {path.name: versions.file_digest(path) for path in _acting(base)}
    held_out = [versions.file_digest(path) for path in job.rows.held_out]
    trainer = {name: value for name, value in (overrides.get("trainer") or {}).items() if name not in _PLACES}
    parts: list[Any] = [
        job.kind, [file.sha256 for file in files], acting, job.epochs, job.shuffle, job.seed, dict(job.rows.columns),
        job.rows.form, sorted(job.rows.ignored), job.rows.keep_duplicates, job.rows.skip_bad, held_out,
        trainer, overrides.get("inference.tool_parser"), overrides.get("inference.reasoning_parser"),
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def _acting(base: Path) -> list[Path]:
    return [path for path in versions.model_files(base) if not versions.is_weights(path.name)]


def _word(name: str) -> str:
    """As much of it as a lineage may be called."""
    return _NOT_IN_NAMES.sub("-", name).strip("-.")[:40] or "rows"
