"""`headrace models diff`."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from headrace_cli.commands.model_options import RegistryOptions, find, split_version
from headrace_cli.commands.shared import AsJson, command, console, echo_json, running_state, table

if TYPE_CHECKING:
    from headrace_operations.catalog import AnswerPair, Change, LogprobDifference
    from headrace_operations.lineage.versions import DataDifference

VersionArgument = Annotated[str, typer.Argument(help="Version, MODEL@DIGEST or MODEL:LABEL.", metavar="VERSION")]


def diff(
    before: VersionArgument,
    after: VersionArgument,
    ask: Annotated[
        bool, typer.Option("--ask", help="Let both versions answer eight prompts; both must be served.")
    ] = False,
    api_key: Annotated[str | None, typer.Option("--api-key", help="API key of the gateway, for --ask.")] = None,
    bus: Annotated[
        str | None, typer.Option("--bus", help="Address of the bus, unless `up` runs here.", metavar="HOST:PORT")
    ] = None,
    *,
    registry: RegistryOptions,
    json: AsJson = False,
) -> None:
    """Compare two versions: settings and files, training data, scores and answers.

    Logprobs of fixed tokens come from the fingerprints without any call; `--ask` compares answers to prompts.
    """
    from headrace_operations import catalog

    with registry.open() as api:
        before_state, after_state = (find(api, *split_version(name)) for name in (before, after))
    assert before_state.manifest is not None
    assert after_state.manifest is not None
    before_manifest, after_manifest = (
        catalog.fetch_manifest(ref) for ref in (before_state.manifest, after_state.manifest)
    )
    changes = list(catalog.compare_settings(before_manifest, after_manifest, catalog.fetch_file))
    data = _data(bus or running_state(registry.data_dir).bus, before_state.id, after_state.id)
    logprob_difference = catalog.compare_fingerprints(before_manifest.fingerprint, after_manifest.fingerprint)
    pairs = catalog.compare_answers(_gateway(registry), before_state.id, after_state.id, api_key) if ask else ()
    if json:
        _print_json(changes, data, catalog.compare_scores(before_state, after_state), logprob_difference, pairs)
        return
    out = console()
    rows = [(change.what, change.before or "-", change.after or "-") for change in changes]
    out.print(table(["setting or file", before_state.id, after_state.id], rows))
    score_rows = [
        (name, *("-" if value is None else f"{value:.4g}" for value in values))
        for name, values in catalog.compare_scores(before_state, after_state).items()
    ]
    out.print(table(["score", before_state.id + ">", after_state.id + ">"], score_rows))
    out.print(_describe_data(data))
    out.print(_describe_answers(logprob_difference))
    for pair in pairs:
        out.print(f"\n[bold]{pair.prompt}[/] {'[dim]equal[/]' if pair.equal else ''}")
        out.print(pair.before, markup=False)
        if not pair.equal:
            out.print(pair.after, markup=False)


def _data(bus: str, before: str, after: str) -> DataDifference:
    import asyncio

    from headrace.topics import connected
    from headrace_operations.lineage.versions import compare_training_data

    async def read() -> DataDifference:
        async with connected(bus) as topics:
            return await compare_training_data(topics, before, after)

    return asyncio.run(read())


def _gateway(registry: RegistryOptions) -> str:
    from headrace_operations.supervisor.state import NotRunning

    url = running_state(registry.data_dir).base_url
    if url is None:
        raise NotRunning("--ask: no gateway runs here; start Headrace with `headrace up`")
    return url


def _describe_data(data: DataDifference) -> str:
    if data.before_alone is None and data.after_alone is None:
        return "no trainer has reported either version; both were trained elsewhere"
    words = [
        f"{count} in {label}"
        for count, label in (
            (data.before_alone, "the first alone"),
            (data.both, "both"),
            (data.after_alone, "the second alone"),
        )
        if count is not None
    ]
    return f"trained revisions of experiences: {', '.join(words)}"


def _describe_answers(difference: LogprobDifference | None) -> str:
    if difference is None:
        return "the vocabularies differ, so logprobs cannot be compared"
    apart = f"{difference.mean:.4g} nats apart in the mean, {difference.most:.4g} at most"
    return f"logprobs of {difference.tokens} fixed tokens: {apart}"


def _print_json(
    changes: list[Change],
    data: DataDifference,
    scores: dict[str, tuple[float | None, float | None]],
    logprob_difference: LogprobDifference | None,
    pairs: tuple[AnswerPair, ...],
) -> None:
    import json

    output = {
        "settings": [asdict(change) for change in changes],
        "data": asdict(data),
        "scores": scores,
        "answers": asdict(logprob_difference) if logprob_difference else None,
        "prompts": [asdict(pair) for pair in pairs],
    }
    echo_json(json.dumps(output))


def add_to(app: typer.Typer) -> None:
    command(
        app,
        diff,
        "headrace models diff email-agent@3f9c2d email-agent@77ab01",
        "headrace models diff opponent:v1.0 opponent:v1.1 --ask",
    )
