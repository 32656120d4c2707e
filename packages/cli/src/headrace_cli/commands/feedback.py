"""`headrace feedback`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from headrace_cli.commands.shared import DataDir, command, console, running_state

if TYPE_CHECKING:
    from headrace.sessions import FeedbackOptions


def feedback(
    value: Annotated[
        float | None, typer.Argument(help="Score of the session or responses; may be omitted.", metavar="[VALUE]")
    ] = None,
    session: Annotated[str | None, typer.Option("--session", help="Session to judge.", metavar="ID")] = None,
    msg_ids: Annotated[
        list[str] | None,
        typer.Option("--msg-id", help="Response to judge (chatcmpl-...); may be repeated.", metavar="ID"),
    ] = None,
    source: Annotated[str, typer.Option(help="Source of the feedback; the scorer weighs sources.")] = "feedback",
    comment: Annotated[str | None, typer.Option(help="Comment for people.")] = None,
    context: Annotated[
        list[str] | None,
        typer.Option(help="Fact for reward functions; may be repeated.", metavar="NAME=VALUE"),
    ] = None,
    end: Annotated[bool, typer.Option("--end", help="End the session.")] = False,
    withdraw: Annotated[bool, typer.Option("--withdraw", help="Withdraw earlier feedback of this source.")] = False,
    base_url: Annotated[
        str | None, typer.Option(help="URL of the gateway; default: the gateway that runs here.")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="OPENAI_API_KEY", help="API key with the scope feedback.")
    ] = None,
    data_dir: DataDir = None,
) -> None:
    """Send feedback about a session or about single responses.

    It may come at any time and be repeated: the last value of each source counts.
    """
    from headrace.client import Client
    from headrace_operations.supervisor.state import NotRunning

    url = base_url or running_state(data_dir).base_url
    if url is None:
        raise NotRunning("no gateway runs here; name one with --base-url")
    options: FeedbackOptions = {"source": source, "msg_ids": msg_ids or [], "ends_session": end, "withdrawn": withdraw}
    if session is not None:
        options["session_id"] = session
    if comment is not None:
        options["comment"] = comment
    if context:
        from headrace_operations.supervisor.overrides import parse_assignments

        options["context"] = parse_assignments(context)  # type: ignore[typeddict-item]
    with Client(url, api_key=api_key) as client:
        feedback_id = client.feedback(value, **options)
    console().print(f"accepted as {feedback_id}")
    if feedback_id.teaches is False:
        console().print(
            f"[yellow]this feedback trains nothing: its turn is left out of training ({feedback_id.reason})[/]"
        )


def add_to(app: typer.Typer) -> None:
    command(
        app,
        feedback,
        "headrace feedback 1 --session run-7",
        "headrace feedback 0 --msg-id chatcmpl-... --comment 'wrong invoice'",
        "headrace feedback --session run-7 --context expected=42",
        "headrace feedback --session run-7 --withdraw",
    )
