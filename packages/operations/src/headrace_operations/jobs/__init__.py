"""Offline training on files and topics: `headrace train`. See docs/guides/offline-training.md.

Rows of files are checked, tokenized as a replica tokenizes them, and published as experiences on a topic of the job. A
trainer then trains a lineage on that topic, as in a replay. Every decision follows from the digests of the files and
from the options, so a job that was killed resumes where it stopped and ends with the same bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_schemas.lazy import lazy_exports

if TYPE_CHECKING:
    from headrace_operations.jobs.job import Job, RowOptions
    from headrace_operations.jobs.runner import run
else:
    __getattr__, __dir__ = lazy_exports(
        __name__, {"headrace_operations.jobs.job": ("Job", "RowOptions"), "headrace_operations.jobs.runner": ("run",)}
    )

__all__ = ["Job", "RowOptions", "run"]
