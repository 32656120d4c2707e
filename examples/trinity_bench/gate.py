"""The registry's gate (docs/gate.md): each play that is asked for is a task of a bench of Trinity's.

    python -m trinity_bench.gate --settings bench.toml --base-url http://127.0.0.1:8000/v1

Starting a bench takes the better part of a minute, so whatever is asked for meanwhile waits and goes into the next
ones: one for each version. A bench that has not scored all of its plays ends the program with status 1 and the reason;
the registry then has no score, rather than a guess.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from example_parts.standard_input import standard_input
from headrace_schemas.gate import Play, Played, Tasks
from trinity_bench.bench import Benches, benches
from trinity_bench.results import BenchFailed
from trinity_bench.settings import Row, Settings, Unusable, read, rows

_GATHER_S = 0.5
"""How long nothing more has to be asked for before a bench begins."""


async def serve(settings: Settings, base_url: str) -> None:
    """Name the tasks, then play what standard input asks for until it ends. Raises `BenchFailed`, `Unusable`."""
    splits = {
        "gate": rows(settings.gate_tasks, settings.name_key, "gate"),
        "audit": rows(settings.audit_tasks, settings.name_key, "audit"),
    }
    print(Tasks(gate=tuple(splits["gate"]), audit=tuple(splits["audit"])).model_dump_json(), flush=True)
    known = splits["gate"] | splits["audit"]
    lines = await standard_input()
    asked = await _asked(lines)
    if not asked:  # its tasks were all that anybody wanted to know
        return
    async with benches(settings, base_url) as running:
        while asked:
            await _answered(running, asked, known)
            asked = await _asked(lines)


async def _asked(lines: asyncio.StreamReader) -> list[Play]:
    """Whatever is asked for in one go; nothing: standard input has ended."""
    found, line = [], await lines.readline()
    while line:
        found.append(Play.model_validate_json(line))
        try:
            line = await asyncio.wait_for(lines.readline(), _GATHER_S)
        except TimeoutError:
            break
    return found


async def _answered(running: Benches, asked: list[Play], known: Mapping[str, Row]) -> None:
    by_version: dict[str, dict[Play, Row]] = defaultdict(dict)
    for play in asked:
        by_version[play.version][play] = known[play.task]
    try:
        async with asyncio.TaskGroup() as group:
            for version, plays in by_version.items():
                group.create_task(_answer(running, version, plays))
    except* BenchFailed as failed:
        raise failed.exceptions[0] from None


async def _answer(running: Benches, version: str, plays: Mapping[Play, Row]) -> None:
    for play, score in (await running.run(version, plays)).items():
        print(Played(**play.model_dump(), score=score).model_dump_json(), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Plays held-out tasks as Trinity-RFT's benches (docs/gate.md).")
    parser.add_argument("--settings", type=Path, required=True, help="what a bench is: trinity_bench/settings.py")
    parser.add_argument("--base-url", default=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"))
    parser.add_argument("--python", help="of Trinity's environment, in place of the settings' own")
    options = parser.parse_args()
    try:
        asyncio.run(serve(read(options.settings, options.python), options.base_url))
    except (BenchFailed, Unusable) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
