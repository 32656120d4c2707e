"""Output of replays: tables for people, JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from headrace_cli.commands.shared import console, table

if TYPE_CHECKING:
    from headrace_operations.replay.report import Report


def as_json(report: Report) -> str:
    """Return all counts of the report."""
    output: dict[str, Any] = {field.name: getattr(report, field.name) for field in fields(report)}
    for name, part in output.items():
        output[name] = part.model_dump(mode="json") if isinstance(part, BaseModel) else part
    output["same"] = report.same
    return json.dumps(output, indent=1)


def show(report: Report, *, planned: bool) -> None:
    """Print the report in the order of the work: records, verdicts, training."""
    out = console()
    out.print(table(["records", "", "count>"], _records(report), f"{report.source} of lineage {report.of}"))
    verdicts = _outcomes(report)
    if verdicts:
        out.print(table(["verdicts", "outcome", "count>"], verdicts))
    training = report.training
    if training is not None:
        rows = [("trained", "", str(training.trained))]
        rows += [("dropped", reason, str(count)) for reason, count in training.dropped.items()]
        rows += [("ignored", "duplicates", str(training.duplicates))] if training.duplicates else []
        rows += [("waiting", "too few for a batch", str(training.waiting))] if training.waiting else []
        out.print(table(["experiences", "", "count>"], rows, f"{'would be' if planned else 'were'} trained"))
        summary = f"{len(training.batches)} batches, {training.versions} versions"
        out.print(f"{summary}; cut {_cut(report)}", markup=False)
        _compare(report)
    if report.version is not None:
        out.print(f"[green]done[/]: {report.version} is the last version of lineage {report.lineage}")
        out.print(f"it is not served; [bold]headrace replay offer {report.lineage}[/] lets the registry evaluate it")


def _records(report: Report) -> list[tuple[str, str, str]]:
    rows = [("read", "", str(report.read)), ("selected", "", str(report.selected))]
    rows += [("unreadable", "", str(report.unreadable))] if report.unreadable else []
    rows += [("of another model", "", str(report.other_models))] if report.other_models else []
    rows += [("experiences", kind, str(count)) for kind, count in sorted(report.kinds.items())]
    if report.scored is not None:
        rows += [("without experience", why, str(count)) for why, count in report.scored.not_trained.items()]
    rows += [("with version", version, str(count)) for version, count in report.versions.most_common(20)]
    return rows


def _outcomes(report: Report) -> list[tuple[str, str, str]]:
    outcomes_by_source: dict[str, Mapping[str, int]] = {}
    for part in (report.judged, report.scored):
        outcomes_by_source |= part.outcomes if part is not None else {}
    return [
        (source, outcome, str(count))
        for source, counts in outcomes_by_source.items()
        for outcome, count in counts.items()
    ]


def _cut(report: Report) -> str:
    how = "where they once were" if report.cut == "recorded" else "by the settings"
    return f"{how} ({report.cut_because})"


def _compare(report: Report) -> None:
    out = console()
    if report.same:
        out.print(f"[green]the batches are those of lineage {report.of}, byte for byte[/]")
    elif report.batches_of_original:
        equal, total = report.batches_equal, report.batches_of_original
        out.print(f"the first {equal} of the {total} batches of lineage {report.of} are equal, byte for byte")
