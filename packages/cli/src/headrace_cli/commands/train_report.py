"""Output of row checks and jobs: tables and coloured text for people, JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from headrace_cli.commands.shared import console, table

if TYPE_CHECKING:
    from rich.text import Text

    from headrace_operations.jobs.check_report import CheckReport, PreviewRow
    from headrace_operations.jobs.runner import JobResult
    from headrace_schemas.programs.models import WrittenBranch

_REFUSALS_PRINTED_MAX = 20
_TRAINED, _CONTEXT = "bold black on green", "dim"


def checked_as_json(report: CheckReport) -> str:
    """Return all counts of the report as JSON."""
    return json.dumps(_report_fields(report), indent=1)


def as_json(result: JobResult) -> str:
    return json.dumps(_result_fields(result), indent=1)


def stages_as_json(results: Iterable[JobResult]) -> str:
    return json.dumps([_result_fields(result) for result in results], indent=1)


def show_checked(report: CheckReport) -> None:
    """Print the counts of the rows, the refused rows, and how the first rows would be trained."""
    out = console()
    for row in report.shown:
        _show_row(row)
    rows = [("read", str(report.rows)), ("can be trained", str(report.kept))]
    rows += [(f"bad: {kind}", str(count)) for kind, count in report.refused.most_common()]
    out.print(table(["rows", "count>"], rows))
    if report.kept:
        spread = ", ".join(f"{name} {value}" for name, value in report.spread().items())
        out.print(f"tokens of a sequence: {spread}; at most {report.tokens_max} can be trained", markup=False)
        total = sum(report.lengths)
        out.print(f"{report.trained_tokens} of {total} tokens are trained, in {report.experiences} sequences")
    if report.forks:
        out.print(
            f"[yellow]{report.forks} more sequences than answers[/]: the chat template renders earlier messages "
            "differently in later turns (it may drop reasoning), so their rows are trained in parts"
        )
    if report.unread:
        columns = ", ".join(f"{name} ({count})" for name, count in report.unread.most_common(20))
        out.print(f"columns that are not read: {columns}", markup=False)
    if not report.held_out:
        out.print(
            "[yellow]rows were not compared with held-out tasks[/]: name files with --held-out, or configure a gate"
        )
    for refusal in report.refusals[:_REFUSALS_PRINTED_MAX]:
        out.print(str(refusal), style="red", markup=False)
    if report.bad > _REFUSALS_PRINTED_MAX:
        out.print(f"and {report.bad - _REFUSALS_PRINTED_MAX} more; --json lists up to 1000")


def show(result: JobResult) -> None:
    """Print what was trained and the next step."""
    out = console()
    journal = result.journal
    rows = [("rows", "trained", str(journal.rows))]
    rows += [("rows", "skipped", str(journal.skipped))] if journal.skipped else []
    rows += [("experiences", "trained", str(journal.trained))]
    rows += [("experiences", f"dropped: {reason}", str(count)) for reason, count in sorted(journal.dropped.items())]
    rows += [("experiences", "waiting, too few for a batch", str(journal.waiting))] if journal.waiting else []
    out.print(table(["", "", "count>"], rows, f"{journal.kind}, {len(journal.batches)} batches"))
    out.print(f"[green]done[/]: {result.version} is the last version of lineage {result.lineage}")
    if result.offered:
        out.print(f"the version is offered; follow it with [bold]headrace models show {journal.model}[/]")
    else:
        out.print(f"it is not served; [bold]headrace replay offer {result.lineage}[/] lets the registry evaluate it")


def segments(branch: WrittenBranch) -> Iterator[tuple[str, bool]]:
    """Return the texts of a branch, each with whether it is trained."""
    return ((text, index % 2 == 1) for index, text in enumerate(branch.texts) if text)


def colour_text(branch: WrittenBranch, *, colour: bool) -> Text:
    """Return the text of a branch: trained text on green, or between ⟦ and ⟧ without colours."""
    from rich.text import Text

    result = Text()
    for text, trained in segments(branch):
        result.append(text if colour or not trained else f"⟦{text}⟧", style=_TRAINED if trained else _CONTEXT)
    return result


def _show_row(row: PreviewRow) -> None:
    out = console()
    for side, branches in enumerate(row.answers):
        for part, branch in enumerate(branches):
            title = f"{row.file}, row {row.row}"
            title += f", {('chosen', 'rejected')[side]}" if len(row.answers) == 2 else ""
            title += f", part {part + 1}" if len(branches) > 1 else ""
            trained = sum(span.length for span in branch.spans)
            out.print(f"── {title}: {len(branch.token_ids)} tokens, {trained} trained", markup=False, style="bold")
            out.print(colour_text(branch, colour=out.is_terminal))


def _report_fields(report: CheckReport) -> dict[str, Any]:
    output = asdict(report)
    # asdict rebuilds counters from their items and so counts the items
    output |= {"unread": dict(report.unread), "refused": dict(report.refused)}
    del output["lengths"]
    output["shown"] = [
        {
            "file": row.file,
            "row": row.row,
            "answers": [[{"tokens": len(b.token_ids), "texts": b.texts} for b in branches] for branches in row.answers],
        }
        for row in report.shown
    ]
    return {**output, "tokens": report.spread(), "bad": report.bad}


def _result_fields(result: JobResult) -> dict[str, Any]:
    fields = result.journal.model_dump(mode="json")
    checked = _report_fields(result.checked) if result.checked is not None else None
    return {"lineage": result.lineage, "offered": result.offered, **fields, "checked": checked}
