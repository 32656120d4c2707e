"""What one version was trained on and another was not."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.errors import UsageError
from headrace_operations.lineage.contents import Name
from headrace_operations.lineage.reading import Reader
from headrace_operations.lineage.versions import held_by


@dataclass(frozen=True, slots=True)
class DataDifference:
    """Revisions of experiences. None: no trainer has reported that version, so it was trained elsewhere."""

    before_alone: int | None
    both: int | None
    after_alone: int | None


async def difference(topics: Reader, before: str, after: str) -> DataDifference:
    """Of all that the weights hold."""
    one, other = await _held(topics, before), await _held(topics, after)
    return DataDifference(
        before_alone=None if one is None else len(one - (other or set())),
        both=None if one is None or other is None else len(one & other),
        after_alone=None if other is None else len(other - (one or set())),
    )


async def _held(topics: Reader, version: str) -> set[Name] | None:
    try:
        return await held_by(topics, version)
    except UsageError:
        return None
