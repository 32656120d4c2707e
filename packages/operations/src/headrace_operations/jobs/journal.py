"""How far a job is: `jobs/<lineage>.json` in the data directory, replaced whole after each part. A job that was killed
goes on after the last part that it says."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Self

from pydantic import Field

from headrace.errors import UsageError
from headrace_operations.jobs.job import PreparedJob
from headrace_runtime import whole_file
from headrace_schemas.base import Model, Sha256, Timestamp, Version
from headrace_schemas.blobs import BlobRef


class JobJournal(Model):
    """What is done. None and False: not yet."""

    digest: Sha256
    kind: str
    model: str
    begun: Timestamp
    rows: int | None = None
    """Rows that can be trained; they lie beside this file."""
    skipped: int = 0
    base: Version | None = None
    """The version that the lineage begins with."""
    base_manifest: BlobRef | None = None
    experiences: int | None = None
    """All of them are on the topic."""
    version: Version | None = None
    """The last one; the job is done."""
    manifest: BlobRef | None = None
    trained: int = 0
    dropped: dict[str, int] = Field(default_factory=dict)
    waiting: int = 0
    batches: tuple[Sha256, ...] = ()
    """Digests of the batches, in order: what was trained, byte for byte."""

    @classmethod
    def read(cls, path: Path) -> Self | None:
        return cls.model_validate_json(path.read_bytes()) if path.exists() else None

    @classmethod
    def begin(cls, prepared: PreparedJob, now: datetime) -> Self:
        """The journal of this job, a new one if there is none. Raises `UsageError` when its name is another job's."""
        path = prepared.place(".json")
        found = cls.read(path)
        if found is None or (found.digest != prepared.digest and found.base is None):  # nothing has come of that one
            found = cls(digest=prepared.digest, kind=prepared.job.kind, model=prepared.model, begun=now)
            found.write(path)
        elif found.digest != prepared.digest:
            raise UsageError(
                f"lineage {prepared.lineage!r} is that of another job, with other rows, options or settings; "
                "name another one with --lineage"
            )
        return found

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        whole_file.replace(path, self.model_dump_json(indent=1).encode())

    def having(self, path: Path, **done: object) -> Self:
        """With what was done now, which is durable when this returns."""
        found = self.model_copy(update=done)
        found.write(path)
        return found


@contextlib.contextmanager
def held(prepared: PreparedJob) -> Iterator[None]:
    """One process at a time works on a job. Raises `UsageError` when another one does."""
    path = prepared.place(".lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"another process works on lineage {prepared.lineage!r} in {prepared.data_dir}") from None
        yield
