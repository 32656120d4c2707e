"""Gate program (docs/gate.md) that plays each request as a task of a Trinity bench.

    python -m trinity_bench.gate --settings bench.toml --base-url http://127.0.0.1:8000/v1

Starting a bench takes almost a minute. Requests that arrive in the meantime wait for the next benches, one for each
version. If a bench does not score all of its plays, the program exits with status 1 and the reason, so that the
registry has no score instead of a guess.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from example_parts.examining import standard_input
from headrace_schemas.programs import Play, PlayResult, Tasks
from trinity_bench.bench import Benches, benches
from trinity_bench.processes import BenchFailed
from trinity_bench.settings import Row, Settings, Unusable, read, rows

_GATHER_S = 0.5
"""Seconds without a further request after which a bench begins."""


async def serve(settings: Settings, base_url: str) -> None:
    """Print the task names, then play requests until standard input ends. Raises `BenchFailed` and `Unusable`."""
    splits = {
        "gate": rows(settings.gate_tasks, settings.name_key, "gate"),
        "audit": rows(settings.audit_tasks, settings.name_key, "audit"),
    }
    print(Tasks(gate=tuple(splits["gate"]), audit=tuple(splits["audit"])).model_dump_json(), flush=True)
    rows_by_task = splits["gate"] | splits["audit"]
    lines = await standard_input()
    requests = await _gather_requests(lines)
    if not requests:  # the registry requested only the task names
        return
    async with benches(settings, base_url) as running:
        while requests:
            await _answer_requests(running, requests, rows_by_task)
            requests = await _gather_requests(lines)


async def _gather_requests(lines: asyncio.StreamReader) -> list[Play]:
    """Return the requests that arrive together, or an empty list at the end of standard input."""
    requests, line = [], await lines.readline()
    while line:
        requests.append(Play.model_validate_json(line))
        try:
            line = await asyncio.wait_for(lines.readline(), _GATHER_S)
        except TimeoutError:
            break
    return requests


async def _answer_requests(running: Benches, requests: list[Play], rows_by_task: Mapping[str, Row]) -> None:
    by_version: dict[str, dict[Play, Row]] = defaultdict(dict)
    for play in requests:
        by_version[play.version][play] = rows_by_task[play.task]
    try:
        async with asyncio.TaskGroup() as group:
            for version, plays in by_version.items():
                group.create_task(_answer(running, version, plays))
    except* BenchFailed as failed:
        raise failed.exceptions[0] from None


async def _answer(running: Benches, version: str, plays: Mapping[Play, Row]) -> None:
    for play, score in (await running.run(version, plays)).items():
        print(PlayResult(**play.model_dump(), score=score).model_dump_json(), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Play held-out tasks as Trinity-RFT's benches (docs/gate.md).")
    parser.add_argument(
        "--settings", type=Path, required=True, help="TOML file with the settings of trinity_bench/settings.py"
    )
    parser.add_argument("--base-url", default=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"))
    parser.add_argument("--python", help="Python of Trinity's environment; overrides the setting")
    options = parser.parse_args()
    try:
        asyncio.run(serve(read(options.settings, options.python), options.base_url))
    except (BenchFailed, Unusable) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
