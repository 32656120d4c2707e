"""Output of `headrace dead-letters`."""

from __future__ import annotations

import json as jsonlib
from typing import TYPE_CHECKING, Any

import typer

from headrace_cli.commands.shared import console, echo_json, table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace_operations.dead_letters import Letter, Plan
    from headrace_operations.dead_letters.reading import Cut
    from headrace_schemas import DeadLetterDecision

_ID_SHOWN = 8
_ERROR_SHOWN = 80
_HELD_BACK_SHOWN = 20


def print_list(newest: Sequence[Letter], counts: list[dict[str, Any]], state: str) -> None:
    """Print a table of the newest letters and the counts of all."""
    from rich.text import Text

    from headrace_operations.dead_letters.reading import escape_control_characters

    out = console()
    if not counts:
        out.print("no dead letters" if state == "all" else f"no dead letters that are {state}")
        return
    rows = [
        (letter.id[:_ID_SHOWN], letter.state, letter.letter.time.isoformat(" ", "seconds")[:19],
         letter.letter.service, letter.position, letter.letter.reason,
         Text(escape_control_characters(letter.letter.error.replace("\n", " "))[:_ERROR_SHOWN]))
        for letter in newest
    ]  # fmt: skip
    if rows:
        header = ["id", "state", "refused (UTC)", "by", "where it was", "reason", "error"]
        out.print(table(header, rows))  # type: ignore[arg-type]
    columns = ("service", "topic", "reason", "open", "retried", "discarded")
    summary = [tuple(str(row[name]) for name in columns) for row in counts]
    out.print(table(["by", "topic", "reason", "open>", "retried>", "discarded>"], summary, "counts"))


def print_letter(letter: Letter) -> None:
    """Print the fields, the decisions and the headers of one letter, and the refused bytes."""
    from headrace_operations.dead_letters.reading import decode_value, escape_control_characters

    out, record = console(), letter.letter
    facts = [
        ("id", letter.id),
        ("state", letter.state),
        ("refused", f"{record.time.isoformat()} by {record.service}, after {record.attempts} attempts"),
        ("reason", record.reason),
        ("error", record.error),
        ("was at", letter.position),
        ("event id", record.source_id),
        ("key", record.source_key or "none"),
        *([("retry of", letter.retry_of)] if letter.retry_of else []),
        *((f"decision {item.number}", _decision(item)) for item in letter.decisions),
        *((f"header {name}", text) for name, text in record.headers.items()),
    ]
    for name, text in facts:
        out.print(f"{escape_control_characters(name):<16} {escape_control_characters(text)}", markup=False)
    out.print(f"{len(record.value)} bytes:", style="dim")
    out.print(decode_value(record.value), markup=False)


def _decision(item: DeadLetterDecision) -> str:
    why = f": {item.reason}" if item.reason else ""
    return f"{item.action} {item.time.isoformat()} by {item.by or 'unknown'}{why}"


def print_unreadable(at: Cut) -> None:
    """Warn about records on `dead-letters` that cannot be parsed."""
    if at.unreadable:
        position, problem = next(iter(at.unreadable.items()))
        console(stderr=True).print(
            f"[yellow]{len(at.unreadable)} records on dead-letters cannot be parsed, such as {position}: {problem}[/]"
        )


def print_outcome(plan: Plan, words: str, json: bool) -> None:
    """Print the result of a retry or discard. Exit with status 1 if letters were held back."""
    if json:
        held_back = [{"id": name, "problem": problem} for name, (_, problem) in plan.held_back.items()]
        echo_json(jsonlib.dumps({"outcome": words, "ids": list(plan.chosen), "held_back": held_back}, indent=1))
    else:
        out = console()
        out.print(f"{len(plan.chosen)} dead letters {words}")
        for letter, problem in list(plan.held_back.values())[:_HELD_BACK_SHOWN]:
            out.print(f"  not {letter.id[:_ID_SHOWN]} ({letter.position}): {problem}", markup=False, style="yellow")
        if len(plan.held_back) > _HELD_BACK_SHOWN:
            out.print(f"  and {len(plan.held_back) - _HELD_BACK_SHOWN} more", style="yellow")
    print_unreadable(plan.at)
    if plan.held_back:
        raise typer.Exit(1)
