"""`headrace feedback`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from headrace_cli.commands.shared import DataDir, command, console, running

if TYPE_CHECKING:
    from headrace.sessions import FeedbackOptions


def feedback(
    value: Annotated[
        float | None, typer.Argument(help="How good it was; leave it out to only attach something.", metavar="[VALUE]")
    ] = None,
    session: Annotated[str | None, typer.Option("--session", help="The session that is meant.", metavar="ID")] = None,
    msg_ids: Annotated[
        list[str] | None,
        typer.Option("--msg-id", help="A response id (chatcmpl-...) that is meant; may be repeated.", metavar="ID"),
    ] = None,
    source: Annotated[str, typer.Option(help="Who says so; sources are weighed by the scorer.")] = "feedback",
    comment: Annotated[str | None, typer.Option(help="For people to read.")] = None,
    context: Annotated[
        list[str] | None,
        typer.Option(help="A fact for reward functions; may be repeated.", metavar="NAME=VALUE"),
    ] = None,
    end: Annotated[bool, typer.Option("--end", help="The session is over with this.")] = False,
    withdraw: Annotated[bool, typer.Option("--withdraw", help="Take earlier feedback of this source back.")] = False,
    base_url: Annotated[str | None, typer.Option(help="The gateway, when it was not started by `up`.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="A key with the scope feedback.")] = None,
    data_dir: DataDir = None,
) -> None:
    """Say how a session, or exactly some responses, went.

    Early, late, or again: the last word of each source counts.
    """
    from headrace.client import Client
    from headrace_operations.errors import NotRunning

    url = base_url or running(data_dir).base_url
    if url is None:
        raise NotRunning("no gateway was started here; name one with --base-url")
    said: FeedbackOptions = {"source": source, "msg_ids": msg_ids or [], "ends_session": end, "withdrawn": withdraw}
    said["value"] = value
    if session is not None:
        said["session_id"] = session
    if comment is not None:
        said["comment"] = comment
    if context:
        from headrace_operations.supervisor.overrides import parse_assignments

        said["context"] = parse_assignments(context)  # type: ignore[typeddict-item]
    with Client(url, api_key=api_key) as client:
        feedback_id = client.feedback(**said)
    console().print(f"accepted as {feedback_id}")
    if feedback_id.teaches is False:
        console().print(f"[yellow]it trains nothing: the turn is left out of training ({feedback_id.reason})[/]")


def add_to(app: typer.Typer) -> None:
    command(
        app,
        feedback,
        "headrace feedback 1 --session run-7",
        "headrace feedback 0 --msg-id chatcmpl-... --comment 'wrong invoice'",
        "headrace feedback --session run-7 --context expected=42",
        "headrace feedback --session run-7 --withdraw",
    )
