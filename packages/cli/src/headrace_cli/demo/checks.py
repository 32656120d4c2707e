"""Checks of a demo without services: the program `checks` of the recipe, which prints a line of JSON for each check."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence

from pydantic import TypeAdapter, ValidationError

from headrace_cli.demo.measures import PromisedLine
from headrace_operations.errors import StartFailed

_CHECKS_S_MAX = 120.0
_LINE: TypeAdapter[PromisedLine] = TypeAdapter(PromisedLine)


def run(command: Sequence[str], environ: Mapping[str, str]) -> tuple[PromisedLine, ...]:
    """Run the checks and return their lines, which have `name`, `wanted`, `found` and `holds`.

    Raises:
        StartFailed: the program failed or printed something else.
    """
    try:
        result = subprocess.run(command, stdout=subprocess.PIPE, env=environ, timeout=_CHECKS_S_MAX, check=True)
        return tuple(_LINE.validate_json(line) for line in result.stdout.splitlines() if line.strip())
    except (subprocess.SubprocessError, ValidationError) as error:
        raise StartFailed(f"the checks of the demo did not run: {error}") from None
