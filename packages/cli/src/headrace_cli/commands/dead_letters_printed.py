"""What `headrace dead-letters` prints."""

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


def listed(newest: Sequence[Letter], counts: list[dict[str, Any]], state: str) -> None:
    from rich.text import Text

    from headrace_operations.dead_letters.showing import harmless

    out = console()
    if not counts:
        out.print("no dead letters" if state == "all" else f"no dead letters that are {state}")
        return
    rows = [
        (one.id[:_ID_SHOWN], one.state, one.letter.time.isoformat(" ", "seconds")[:19], one.letter.service,
         one.position, one.letter.reason, Text(harmless(one.letter.error.replace("\n", " "))[:_ERROR_SHOWN]))
        for one in newest
    ]  # fmt: skip
    if rows:
        out.print(table(["id", "state", "refused (UTC)", "by", "where it was", "reason", "error"], rows))  # type: ignore[arg-type]
    columns = ("service", "topic", "reason", "open", "retried", "discarded")
    summary = [tuple(str(row[name]) for name in columns) for row in counts]
    out.print(table(["by", "topic", "reason", "open>", "retried>", "discarded>"], summary, "how many"))


def one_letter(one: Letter) -> None:
    from headrace_operations.dead_letters.showing import decoded, harmless

    out, letter = console(), one.letter
    facts = [
        ("id", one.id),
        ("state", one.state),
        ("refused", f"{letter.time.isoformat()} by {letter.service}, after {letter.attempts} attempts"),
        ("reason", letter.reason),
        ("error", letter.error),
        ("was at", one.position),
        ("event id", letter.source_id),
        ("key", letter.source_key or "none"),
        *([("retry of", one.retry_of)] if one.retry_of else []),
        *((f"decision {item.number}", _decision(item)) for item in one.decisions),
        *((f"header {name}", text) for name, text in letter.headers.items()),
    ]
    for name, text in facts:
        out.print(f"{harmless(name):<16} {harmless(text)}", markup=False)
    out.print(f"{len(letter.value)} bytes:", style="dim")
    out.print(decoded(letter.value), markup=False)


def _decision(item: DeadLetterDecision) -> str:
    why = f": {item.reason}" if item.reason else ""
    return f"{item.action} {item.time.isoformat()} by {item.by or 'unknown'}{why}"


def unreadable(at: Cut) -> None:
    if at.unreadable:
        place, problem = next(iter(at.unreadable.items()))
        console(stderr=True).print(
            f"[yellow]{len(at.unreadable)} records of dead-letters are none themselves, e.g. {place}: {problem}[/]"
        )


def outcome(made: Plan, words: str, json: bool) -> None:
    """Exits with 1 when something that was meant was held back."""
    if json:
        held = [{"id": name, "problem": problem} for name, (_, problem) in made.held_back.items()]
        echo_json(jsonlib.dumps({"outcome": words, "ids": list(made.chosen), "held_back": held}, indent=1))
    else:
        out = console()
        out.print(f"{len(made.chosen)} dead letters {words}")
        for one, problem in list(made.held_back.values())[:_HELD_BACK_SHOWN]:
            out.print(f"  not {one.id[:_ID_SHOWN]} ({one.position}): {problem}", markup=False, style="yellow")
        if len(made.held_back) > _HELD_BACK_SHOWN:
            out.print(f"  and {len(made.held_back) - _HELD_BACK_SHOWN} more", style="yellow")
    unreadable(made.at)
    if made.held_back:
        raise typer.Exit(1)
