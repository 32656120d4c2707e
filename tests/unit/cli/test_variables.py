"""Services accept every environment variable of the command when the same shell starts them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import typer.main

from headrace_cli.app import app
from headrace_inference.vllm_engine import orphans
from headrace_runtime.settings.sections import Common, ServiceSettings, load


def variables(command: Any) -> Iterator[str]:
    for parameter in command.params:
        named = parameter.envvar or ()
        yield from (named,) if isinstance(named, str) else named
    for inner in getattr(command, "commands", {}).values():
        yield from variables(inner)


VARIABLES = sorted({*variables(typer.main.get_command(app)), orphans.VARIABLE})


def test_there_are_some() -> None:
    assert {"HEADRACE_CONFIG", "HEADRACE_DATA_DIR", "HEADRACE_WHO"} <= set(VARIABLES)


@pytest.mark.parametrize("variable", VARIABLES)
def test_no_service_refuses_it(variable: str) -> None:
    common, _ = load("gateway", ServiceSettings, None, {variable: "somebody"})
    assert isinstance(common, Common)
