"""Clients of other projects, newest releases, against a gateway with base URL and key alone changed.

Each client has two conversations at the same time, each a tool loop of several turns. The model is a scripted replica
with a real chat template; the account is what the collector makes of the captured turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from headrace_gateway.settings import UpstreamSettings
from headrace_runtime.kafka import wire
from headrace_schemas import Turn
from headrace_trainer.experiences.restrictions import SetBuilder
from tests.clients.agents import CLIENTS, PACKAGES, Call, Client
from tests.clients.replica import VOCABULARY, AgentReplica, ClientAccount, account_of, trajectories_of
from tests.support.gateway import Gateway, gateway
from tests.system.program import ROOT, Line, Program, Run

TABLE = ROOT / "docs" / "clients.md"
_BEGIN, _END = "<!-- table -->", "<!-- end of the table -->"
_TIMEOUT_S = 240.0
_INLINE_BYTES_MAX = 64 << 20
_TRAINED_MIN = 0.95
"""Required share of trained turns of clients with typed answers."""
_QUIET = {
    "NO_COLOR": "1", "CI": "1", "DO_NOT_TRACK": "1", "OTEL_SDK_DISABLED": "true", "CREWAI_DISABLE_TELEMETRY": "true",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True", "PYTHONWARNINGS": "ignore", "HF_HUB_OFFLINE": "1",
}  # fmt: skip
"""Variables that keep clients from reporting, updating and downloading."""


@dataclass(frozen=True)
class Outcome:
    """The result of two conversations of a client."""

    account: ClientAccount
    problems: tuple[str, ...]
    seconds: float


def play(run: Run) -> None:
    environments: Path = run.options.environments
    chosen = [client for client in CLIENTS if not run.options.only or client.name in run.options.only]
    replica = AgentReplica(run.folder)
    rows = []
    for client in chosen:
        problem = environment_problem(environments, client.environment)
        if problem is not None:
            run.skip(client.name, problem)
            continue
        version = _version(environments, client)
        folder = run.folder / client.name.replace(" ", "-").replace("/", "-")
        folder.mkdir()
        # The list that stands for the bus has no blobs, and prompts of coding agents are long in tokens of a byte.
        with mock.patch.object(wire, "PAYLOAD_BYTES_MAX", _INLINE_BYTES_MAX):
            outcome = asyncio.run(_converse(client, environments, folder, replica))
        run.add(*_lines(client, outcome))
        rows.append(_row(client, version, outcome))
    run.figures["rows"] = rows
    if run.options.write:
        _write_table(rows)


async def _converse(client: Client, environments: Path, folder: Path, replica: AgentReplica) -> Outcome:
    began_s = time.monotonic()
    problems: list[str] = []
    settings: dict[str, Any] = {"any_model_name": "always", "upstream": UpstreamSettings()}
    async with replica.running(), gateway(folder, replica, **settings) as served:
        calls = [_call(environments, folder, served, number) for number in range(2)]
        outputs = await asyncio.gather(*(_run(client, call) for call in calls))
        for number, (status, output) in enumerate(outputs):
            if status:
                problems.append(f"conversation {number} ended with status {status}: {output[-1500:]}")
            elif f"The word is WORD-{number}" not in output:
                problems.append(f"conversation {number} has another answer: {output[-500:]}")
        account = account_of(served.turns, SetBuilder(replica.base, VOCABULARY))
        problems += _mixed_runs(served.turns)
    return Outcome(account, tuple(problems), time.monotonic() - began_s)


def _mixed_runs(turns: Sequence[Turn]) -> list[str]:
    """Return the runs that hold the words of both conversations."""
    texts = {turn.turn_id: str(turn.messages) for turn in turns}
    runs = {run.trajectory_id: "".join(texts[name] for name in run.turn_ids) for run in trajectories_of(turns)}
    return [
        f"run {name} is of both conversations" for name, text in runs.items() if "WORD-0" in text and "WORD-1" in text
    ]


def _call(environments: Path, folder: Path, served: Gateway, number: int) -> Call:
    home, work = folder / f"home-{number}", folder / f"work-{number}"
    home.mkdir()
    work.mkdir()
    (work / "note.txt").write_text("blue\n")
    question = f"Which word is in note.txt? It belongs to WORD-{number}."
    return Call(served.url, question, environments, home, work)


async def _run(client: Client, call: Call) -> tuple[int, str]:
    """Return the exit status and the output of one conversation."""
    command, variables = client.command(call)
    environ = {"PATH": os.environ["PATH"], "HOME": str(call.home), "LANG": "C.UTF-8", **_QUIET, **variables}
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=call.work,
        env=environ,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            output, _ = await process.communicate()
    except TimeoutError:
        process.kill()
        output, _ = await process.communicate()
        return -1, f"no end within {_TIMEOUT_S:g} s: {output.decode(errors='replace')}"
    return process.returncode or 0, output.decode(errors="replace")


def _lines(client: Client, outcome: Outcome) -> Iterator[Line]:
    account = outcome.account
    problems = {"problems": list(outcome.problems)}
    yield Line(f"{client.name}: both conversations end with their answers", str(len(outcome.problems)), "0 problems",
               not outcome.problems, problems)  # fmt: skip
    yield Line(f"{client.name}: runs", str(account.runs), str(client.runs), account.runs == client.runs)
    dropped = sum(account.left_out.values())
    figure = f"{account.trained} and {dropped} of {account.calls}"
    holds = account.trained + dropped == account.calls > 0
    yield Line(f"{client.name}: turns trained and left out", figure, "all", holds, {"left_out": account.left_out})
    if client.typed:
        share = account.trained / max(1, account.calls)
        yield Line(f"{client.name}: share of turns trained", f"{share:.0%}", f"{_TRAINED_MIN:.0%}",
                   share >= _TRAINED_MIN)  # fmt: skip
    if client.branches is not None:
        yield Line(f"{client.name}: branches", str(account.branches), str(client.branches),
                   account.branches == client.branches)  # fmt: skip


def _row(client: Client, version: str, outcome: Outcome) -> dict[str, object]:
    account = outcome.account
    left_out = ", ".join(f"{count} {reason}" for reason, count in sorted(account.left_out.items()))
    return {
        "client": client.name,
        "version": version,
        "abilities": client.abilities,
        "works": "yes" if not outcome.problems else "no",
        "calls": account.calls,
        "runs": account.runs,
        "branches": account.branches,
        "trained": account.trained,
        "left_out": left_out or "none",
    }


def _write_table(rows: list[dict[str, object]]) -> None:
    """Write rows to the table of the page. Rows of clients that did not run stay."""
    page = TABLE.read_text(encoding="utf-8")
    head, _, rest = page.partition(_BEGIN)
    earlier, _, tail = rest.partition(_END)
    lines = {line.split(" | ")[0].removeprefix("| "): line for line in earlier.strip().splitlines()[2:]}
    lines |= {str(row["client"]): _table_line(row.values()) for row in rows}
    names = [name.replace("_", " ") for name in rows[0]]
    table = [_table_line(names), _table_line("---" for _ in names)]
    table += [lines[client.name] for client in CLIENTS if client.name in lines]
    text = "\n".join(table)
    TABLE.write_text(f"{head}{_BEGIN}\n\n{text}\n\n{_END}{tail}", encoding="utf-8")


def _table_line(values: Iterable[object]) -> str:
    return f"| {' | '.join(map(str, values))} |"


def environment_problem(environments: Path, name: str) -> str | None:
    """Install the newest releases of an environment once. Return the problem, if there is one."""
    folder = environments / name
    if (folder / "installed").exists():
        return None
    folder.mkdir(parents=True, exist_ok=True)
    if name == "node":
        commands = [["npm", "install", "--no-audit", "--no-fund", "--silent", "--prefix", str(folder), *PACKAGES[name]]]
    else:
        interpreter = str(folder / "bin" / "python")
        uv = str(ROOT / ".venv" / "bin" / "uv")
        commands = [[uv, "venv", "--quiet", "--allow-existing", "--python", sys.executable, str(folder)]]
        commands += [[uv, "pip", "install", "--quiet", "--python", interpreter, *PACKAGES[name]]]
    for command in commands:
        process = subprocess.run(command, capture_output=True, text=True, check=False)
        if process.returncode:
            return f"{command[0]} failed: {process.stderr[-300:]}"
    (folder / "installed").touch()
    return None


def _version(environments: Path, client: Client) -> str:
    folder = environments / client.environment
    if client.environment == "node":
        package = json.loads((folder / "node_modules" / client.package / "package.json").read_text())
        return str(package["version"])
    code = f"import importlib.metadata as m; print(m.version({client.package!r}))"
    command = [str(folder / "bin" / "python"), "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", nargs="+", choices=[client.name for client in CLIENTS], help="clients (default: all)")
    parser.add_argument("--environments", type=Path, default=ROOT / ".cache" / "clients", help="folder of the packages")
    parser.add_argument("--write", action="store_true", help=f"write the table to {TABLE.relative_to(ROOT)}")


PROGRAM = Program("clients of other projects against a gateway", play, _add_arguments)
