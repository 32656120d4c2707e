"""`headrace models diff`."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from headrace_cli.commands.model_options import RegistryOptions, find, parted
from headrace_cli.commands.shared import AsJson, command, console, echo_json, running, table

if TYPE_CHECKING:
    from headrace_operations.catalog.comparing import Answers, Change
    from headrace_operations.catalog.prompts import Pair
    from headrace_operations.lineage.difference import DataDifference

One = Annotated[str, typer.Argument(help="MODEL@DIGEST or MODEL:LABEL.", metavar="VERSION")]


def diff(
    before: One,
    after: One,
    ask: Annotated[bool, typer.Option("--ask", help="Have both answer eight prompts; both have to be served.")] = False,
    api_key: Annotated[str | None, typer.Option("--api-key", help="A key of the gateway, for --ask.")] = None,
    bus: Annotated[
        str | None, typer.Option("--bus", help="The bus, when `up` does not run here.", metavar="HOST:PORT")
    ] = None,
    *,
    at: RegistryOptions,
    json: AsJson = False,
) -> None:
    """Compare two versions: settings and files, what they were trained on, scores, and what they answer.

    What they answer to the fixed tokens of the fingerprint costs nothing; `--ask` shows prompts and answers.
    """
    from headrace_operations.catalog import comparing, exporting, prompts

    with at.open() as api:
        one, other = (find(api, *parted(name)) for name in (before, after))
    assert one.manifest is not None
    assert other.manifest is not None
    mine, theirs = (exporting.manifest_of(ref) for ref in (one.manifest, other.manifest))
    changes = list(comparing.settings(mine, theirs, exporting.file_of))
    data = _data(bus or running(at.data_dir).bus, one.id, other.id)
    apart = comparing.answers(mine.fingerprint, theirs.fingerprint)
    pairs = prompts.ask(_gateway(at), one.id, other.id, api_key) if ask else ()
    if json:
        _print_json(changes, data, comparing.scores(one, other), apart, pairs)
        return
    out = console()
    rows = [(change.what, change.before or "-", change.after or "-") for change in changes]
    out.print(table(["setting or file", one.id, other.id], rows))
    shown = [
        (name, *("-" if value is None else f"{value:.4g}" for value in two))
        for name, two in comparing.scores(one, other).items()
    ]
    out.print(table(["score", one.id + ">", other.id + ">"], shown))
    out.print(_said_of_data(data))
    out.print(_said_of_answers(apart))
    for pair in pairs:
        out.print(f"\n[bold]{pair.prompt}[/] {'[dim]equal[/]' if pair.equal else ''}")
        out.print(pair.before, markup=False)
        if not pair.equal:
            out.print(pair.after, markup=False)


def _data(bus: str, before: str, after: str) -> DataDifference:
    import asyncio

    from headrace.topics import connected
    from headrace_operations.lineage.difference import difference

    async def read() -> DataDifference:
        async with connected(bus) as topics:
            return await difference(topics, before, after)

    return asyncio.run(read())


def _gateway(at: RegistryOptions) -> str:
    from headrace_operations.errors import NotRunning

    url = running(at.data_dir).base_url
    if url is None:
        raise NotRunning("no gateway was started here, so --ask has nobody to ask")
    return url


def _said_of_data(data: DataDifference) -> str:
    if data.before_alone is None and data.after_alone is None:
        return "trained elsewhere, both: no trainer has reported them"
    words = [
        f"{count} in {which}"
        for count, which in (
            (data.before_alone, "the first alone"),
            (data.both, "both"),
            (data.after_alone, "the second alone"),
        )
        if count is not None
    ]
    return f"trained revisions of experiences: {', '.join(words)}"


def _said_of_answers(apart: Answers | None) -> str:
    if apart is None:
        return "their vocabularies differ, so no logprobs can be compared"
    return f"logprobs of {apart.tokens} fixed tokens: {apart.mean:.4g} nats apart in the mean, {apart.most:.4g} at most"


def _print_json(
    changes: list[Change],
    data: DataDifference,
    scores: dict[str, tuple[float | None, float | None]],
    apart: Answers | None,
    pairs: tuple[Pair, ...],
) -> None:
    import json

    found = {
        "settings": [asdict(change) for change in changes],
        "data": asdict(data),
        "scores": scores,
        "answers": asdict(apart) if apart else None,
        "prompts": [asdict(pair) for pair in pairs],
    }
    echo_json(json.dumps(found))


def add_to(app: typer.Typer) -> None:
    command(
        app,
        diff,
        "headrace models diff email-agent@3f9c2d email-agent@77ab01",
        "headrace models diff opponent:v1.0 opponent:v1.1 --ask",
    )
