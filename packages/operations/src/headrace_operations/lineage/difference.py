"""Comparison of the training data of two versions."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.errors import UsageError
from headrace_operations.lineage.contents import RevisionKey
from headrace_operations.lineage.reading import Reader
from headrace_operations.lineage.versions import revisions_of


@dataclass(frozen=True, slots=True)
class DataDifference:
    """Number of experience revisions in one or both versions. None: no trainer reported that version."""

    before_alone: int | None
    both: int | None
    after_alone: int | None


async def compare_training_data(topics: Reader, before: str, after: str) -> DataDifference:
    """Compare all experience revisions that the weights of the two versions contain."""
    before_revisions, after_revisions = await _revisions(topics, before), await _revisions(topics, after)
    return DataDifference(
        before_alone=None if before_revisions is None else len(before_revisions - (after_revisions or set())),
        both=None if before_revisions is None or after_revisions is None else len(before_revisions & after_revisions),
        after_alone=None if after_revisions is None else len(after_revisions - (before_revisions or set())),
    )


async def _revisions(topics: Reader, version: str) -> set[RevisionKey] | None:
    try:
        return await revisions_of(topics, version)
    except UsageError:
        return None
