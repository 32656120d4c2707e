"""How rows and jobs are shown: tables and coloured text for people, an object for programs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from headrace_cli.commands.shared import console, table

if TYPE_CHECKING:
    from rich.text import Text

    from headrace_operations.jobs.check_report import CheckReport, Shown
    from headrace_operations.jobs.runner import JobResult
    from headrace_schemas.written import WrittenBranch

_REFUSALS_SHOWN = 20
_TRAINED, _CONTEXT = "bold black on green", "dim"


def checked_as_json(report: CheckReport) -> str:
    """Everything that was counted."""
    return json.dumps(_checked(report), indent=1)


def as_json(result: JobResult) -> str:
    return json.dumps(_result(result), indent=1)


def stages_as_json(results: Iterable[JobResult]) -> str:
    return json.dumps([_result(one) for one in results], indent=1)


def show_checked(report: CheckReport) -> None:
    """What is there, what is bad, and how the first rows would be trained."""
    out = console()
    for one in report.shown:
        _show_row(one)
    rows = [("read", str(report.rows)), ("can be trained", str(report.kept))]
    rows += [(f"bad: {kind}", str(count)) for kind, count in report.refused.most_common()]
    out.print(table(["rows", "count>"], rows))
    if report.kept:
        spread = ", ".join(f"{name} {value}" for name, value in report.spread().items())
        out.print(f"tokens of a sequence: {spread}; at most {report.tokens_max} can be trained", markup=False)
        whole = sum(report.lengths)
        out.print(f"{report.trained_tokens} of {whole} tokens are trained, in {report.experiences} sequences")
    if report.forks:
        out.print(
            f"[yellow]{report.forks} sequences more than answers[/]: the chat template shows earlier messages "
            "otherwise later on (it may drop reasoning), so their rows are trained in parts"
        )
    if report.unread:
        columns = ", ".join(f"{name} ({count})" for name, count in report.unread.most_common(20))
        out.print(f"columns that nobody reads: {columns}", markup=False)
    if not report.held_out:
        out.print("[yellow]no held-out tasks were looked for[/]: name files with --held-out, or configure a gate")
    for refusal in report.refusals[:_REFUSALS_SHOWN]:
        out.print(str(refusal), style="red", markup=False)
    if report.bad > _REFUSALS_SHOWN:
        out.print(f"and {report.bad - _REFUSALS_SHOWN} more; --json lists up to 1000")


def show(result: JobResult) -> None:
    """What was trained, and what to do with it."""
    out = console()
    journal = result.journal
    rows = [("rows", "trained", str(journal.rows))]
    rows += [("rows", "left out", str(journal.skipped))] if journal.skipped else []
    rows += [("experiences", "trained", str(journal.trained))]
    rows += [("experiences", f"dropped: {reason}", str(count)) for reason, count in sorted(journal.dropped.items())]
    rows += [("experiences", "left over, too few for a batch", str(journal.waiting))] if journal.waiting else []
    out.print(table(["", "", "count>"], rows, f"{journal.kind}, {len(journal.batches)} batches"))
    out.print(f"[green]done[/]: {result.version} is the last version of lineage {result.lineage}")
    if result.offered:
        out.print(f"the registry tries it; [bold]headrace models show {journal.model}[/] tells what becomes of it")
    else:
        out.print(f"it serves nobody; [bold]headrace replay offer {result.lineage}[/] lets the registry try it")


def segments(branch: WrittenBranch) -> Iterator[tuple[str, bool]]:
    """The texts of a branch, each with whether it is trained."""
    return ((text, place % 2 == 1) for place, text in enumerate(branch.texts) if text)


def coloured(branch: WrittenBranch, *, colour: bool) -> Text:
    """Trained text on green; where there are no colours between ⟦ and ⟧."""
    from rich.text import Text

    found = Text()
    for text, trained in segments(branch):
        found.append(text if colour or not trained else f"⟦{text}⟧", style=_TRAINED if trained else _CONTEXT)
    return found


def _show_row(shown: Shown) -> None:
    out = console()
    for side, branches in enumerate(shown.answers):
        for part, branch in enumerate(branches):
            title = f"{shown.file}, row {shown.row}"
            title += f", {('chosen', 'rejected')[side]}" if len(shown.answers) == 2 else ""
            title += f", part {part + 1}" if len(branches) > 1 else ""
            trained = sum(span.length for span in branch.spans)
            out.print(f"── {title}: {len(branch.token_ids)} tokens, {trained} trained", markup=False, style="bold")
            out.print(coloured(branch, colour=out.is_terminal))


def _checked(report: CheckReport) -> dict[str, Any]:
    found = asdict(report)
    # asdict makes counters anew of their items, and so counts these
    found |= {"unread": dict(report.unread), "refused": dict(report.refused)}
    del found["lengths"]
    found["shown"] = [
        {
            "file": one.file,
            "row": one.row,
            "answers": [[{"tokens": len(b.token_ids), "texts": b.texts} for b in branches] for branches in one.answers],
        }
        for one in report.shown
    ]
    return {**found, "tokens": report.spread(), "bad": report.bad}


def _result(result: JobResult) -> dict[str, Any]:
    found = result.journal.model_dump(mode="json")
    checked = _checked(result.checked) if result.checked is not None else None
    return {"lineage": result.lineage, "offered": result.offered, **found, "checked": checked}
