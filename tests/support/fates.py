"""Training status of each revision of each experience, from a lineage's reports alone."""

from __future__ import annotations

from collections.abc import Iterable

from headrace_schemas import TrainingMetrics

Key = tuple[str, int]
"""Experience and revision."""


def follow(reports: Iterable[TrainingMetrics]) -> tuple[dict[Key, str], list[str]]:
    """Return each revision's status (`trained`, `queued` again, `undone`, or the reason of a drop), and contradictions.
    Each
    report counts once.
    """
    fates: dict[Key, str] = {}
    wrong: list[str] = []
    for report in sorted(reports, key=lambda report: report.account):
        for verdict in report.verdicts:
            key = verdict.experience_id, verdict.revision
            if fates.get(key, "queued") != "queued":
                wrong.append(f"{key} has two verdicts, and nothing was undone between them")
            fates[key] = "excluded" if verdict.detail == "excluded" else verdict.dropped or "trained"
        for undone in report.undone:
            key = undone.experience_id, undone.revision
            if fates.get(key) != "trained" and not (key in fates and undone.queued):
                wrong.append(f"{key} was undone and had done nothing")
            fates[key] = "queued" if undone.queued else "undone"
        for restored in report.restored:
            key = restored.experience_id, restored.revision
            if fates.get(key, "trained") == "trained":
                wrong.append(f"{key} was restored and had not been undone")
            fates[key] = "trained"
    return fates, wrong
