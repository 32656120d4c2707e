"""Journal of a job: `jobs/<lineage>.json` in the data directory, replaced atomically after each part.

A job that was killed resumes after the last part in its journal.
"""

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
from headrace_runtime.storage import files
from headrace_schemas.values.base import Model, Sha256, Timestamp, Version
from headrace_schemas.values.blobs import BlobRef


class JobJournal(Model):
    """Finished parts of a job. Fields are None or False until their part is finished."""

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
        """Return the journal of this job, a new one if there is none.

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
        files.replace_file(path, self.model_dump_json(indent=1).encode())

    def record(self, path: Path, **fields: object) -> Self:
        """Return the journal with new field values, after they were written durably to `path`."""
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
