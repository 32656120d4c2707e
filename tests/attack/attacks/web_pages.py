"""A hostile web page in a real browser that tries every route of every service of a default stack, in all fetch modes.

The page is served from another port of this machine, from another site, and from a name that DNS rebinding points at
the service. Every process records which requests of the browser arrived and which reached its handlers: none may.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

from headrace_operations.supervisor import Supervisor
from tests.support import presence, tiny_model
from tests.support.fake_llm import FakeLLM, verdict
from tests.system.program import Line, at_least, none_of

TITLE = "a hostile page and DNS rebinding, in a real browser"
ROOT = Path(__file__).parents[3]
_PROGRAM, _SEEN = ROOT / "tests/attack/browser.py", ROOT / "tests/attack/seen_requests"


async def attack(folder: Path, rng: random.Random) -> list[Line]:
    if reason := presence.missing_browser():
        return [Line("a page in a real browser", f"not played: {reason}", "played where there is a browser", True)]
    base = await asyncio.to_thread(tiny_model.build, folder / "base", seed=rng.randrange(2**31))
    notes = folder / "notes"
    notes.mkdir()
    (folder / "rewards.py").write_text("def fine(trajectory):\n    return 1.0\n")
    environ = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    environ |= {"PYTHONPATH": os.pathsep.join([str(_SEEN), str(folder)]), "SEEN_REQUESTS": str(notes)}
    with FakeLLM(verdict(outcome=4, grounding=4, conduct=3, clarity=5)) as judge, contextlib.ExitStack() as running:
        settings: dict[str, object] = {
            "scorer.functions": [f"{folder}/rewards.py:fine"],
            "judge.endpoint.base_url": judge.base_url,
            "judge.endpoint.model": "judge",
            "trainer.base": base,
            "trainer.model": "m",
            "trainer.compute.device": "cpu",
            "inference.torch.device": "cpu",
        }
        supervisor = Supervisor(folder / "data", settings=settings, auto_ports=True, environ=environ)
        running.callback(supervisor.stop)
        supervisor.start()
        await asyncio.to_thread(supervisor.wait_ready, 300)
        routes = _notes(notes, "route")
        names = {service.info.module: service.name for service in supervisor.plan.services}
        targets = [
            {
                "url": supervisor.url(name),
                "routes": [[entry["path"], entry["methods"]] for entry in routes if entry["service"] == module],
            }
            for module, name in names.items()
        ]
        answers = await asyncio.to_thread(presence.drive, _PROGRAM, {"targets": targets})
        arrived, reached = _notes(notes, "arrived"), _notes(notes, "reached")
    requests_by_service = Counter(entry["service"] for entry in arrived)
    silent = [name for module, name in names.items() if not requests_by_service[module]]
    return [
        none_of(f"requests of a page that reached code {_summary(reached)}".strip(), len(reached), len(arrived)),
        none_of("answers that a page could read", len(answers["readable"]), answers["tried"]),
        none_of(f"services that no request of the browser arrived at {silent or ''}".strip(), len(silent), len(names)),
        at_least("routes of all services that were tried", sum(len(entry["routes"]) for entry in targets), 40),
    ]


def _notes(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = [line for path in sorted(folder.iterdir()) for line in path.read_text(encoding="utf-8").splitlines()]
    return [note for note in map(json.loads, lines) if note["kind"] == kind]


def _summary(reached: list[dict[str, Any]]) -> str:
    return (
        str(sorted({f"{entry['method']} {entry['service']}{entry['path']}" for entry in reached})[:10])
        if reached
        else ""
    )
