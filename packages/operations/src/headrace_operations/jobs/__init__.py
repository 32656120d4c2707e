"""Training from files and from topics, beside what runs: `headrace train`. See docs/guides/offline-training.md.

Rows of files are checked, become the tokens that a replica would make of them, and go as experiences to a topic of the
job's own. A trainer then makes a lineage of it, as in a replay. Everything that is decided on the way follows from the
files' digests and the options, so a job that was killed goes on where it was and ends with the same bytes.
"""

from __future__ import annotations

from headrace_schemas.lazy import lazily

__getattr__, __dir__ = lazily(
    __name__, {"headrace_operations.jobs.job": ("Job", "RowOptions"), "headrace_operations.jobs.runner": ("run",)}
)
