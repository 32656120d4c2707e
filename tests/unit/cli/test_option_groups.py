"""Options that are written once, for several commands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer
from typer.testing import CliRunner

from headrace_cli.commands.option_groups import expand_option_groups


@dataclass(frozen=True)
class Where:
    place: Annotated[str, typer.Option("--at", help="Where.")] = "here"


@dataclass(frozen=True)
class Exactly(Where):
    times: Annotated[list[int] | None, typer.Option(min=1)] = None


def show(name: Annotated[str, typer.Argument()], *, where: Exactly, loud: bool = False) -> None:
    """Show it."""
    typer.echo(f"{name} {where} {loud}")


def plain(name: str) -> None:
    typer.echo(name)


def test_a_group_is_given_by_its_options() -> None:
    app = typer.Typer()
    app.command()(expand_option_groups(show))
    run = CliRunner().invoke
    assert run(app, ["x"]).output == "x Exactly(place='here', times=None) False\n"
    result = run(app, ["x", "--at", "there", "--times", "1", "--times", "2", "--loud"])
    assert result.output == "x Exactly(place='there', times=[1, 2]) True\n"
    assert run(app, ["x", "--times", "0"]).exit_code == 2
    assert "Where." in run(app, ["--help"]).output


def test_a_function_without_a_group_stays_as_it_is() -> None:
    assert expand_option_groups(plain) is plain
