"""Gate program (docs/gate.md) that plays each request as a task of a Trinity bench, with one local Ray for all of them.

    python -m trinity_bench.gate --settings bench.toml --base-url http://127.0.0.1:8000/v1

Starting a bench takes almost a minute. Requests that arrive in the meantime wait for the next benches, one for each
version. If a bench does not score all of its plays, the program exits with status 1 and the reason, so that the
registry has no score instead of a guess.

The registry ends gates with SIGKILL, so that another process must remove the folder.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from asyncio.subprocess import DEVNULL, STDOUT, Process
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path

from example_parts.examining import standard_input
from headrace_runtime.process.parent_death import parent_bound_command
from headrace_schemas.programs import Play, PlayResult, Tasks
from trinity_bench.settings import Job, Row, Settings, Unusable, as_yaml, configuration, plays_timeout_s, read, rows

_HERE = Path(__file__).parent
_END_S = 20.0
_TAIL_BYTES = 20_000
_REASON = 300
_STARTED, _TIMED_OUT = b"Ray runtime started", b"timed out during startup"
_POLL_S = 0.1
_CPUS = "2"
"""CPUs that Ray reserves, and processes that it starts in advance. Trinity's explorer takes one CPU, and runners
none."""
_STORE_BYTES = "100000000"
_GATHER_S = 0.5
"""Seconds without a further request after which a bench begins."""


class BenchFailed(Exception):
    """Error of a bench that did not score every play, so that its result is not used."""


async def environment(settings: Settings, base_url: str, folder: Path, ray_address: str) -> Mapping[str, str]:
    """Return the environment of Trinity's processes: that of this process, with the gateway's key, and further
    variables. Raises `BenchFailed`."""
    if not base_url.endswith("/v1"):
        raise BenchFailed(f"--base-url = {base_url}: must end with /v1")
    token = folder / "ray-token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(), encoding="utf-8")
    path = [str(_HERE.parent)]
    if not await _has_vllm(settings.python):
        path.append(str(_HERE / "inside/without_vllm"))
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*path, *filter(None, [os.environ.get("PYTHONPATH")])]),
        "RAY_ADDRESS": ray_address,
        "RAY_AUTH_MODE": "token",  # without a token, anybody who reaches Ray's ports can run code
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_agent_register_timeout_ms": str(round(settings.start_timeout_s * 1000)),
        "RAY_worker_register_timeout_seconds": str(round(settings.start_timeout_s)),
        "HF_DATASETS_CACHE": str(folder / "datasets"),
        "HEADRACE_BENCH_URL": base_url.removesuffix("/v1"),
    }


async def _has_vllm(python: str) -> bool:
    question = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    try:
        process = await asyncio.create_subprocess_exec(python, "-c", question, stdin=DEVNULL, stdout=DEVNULL)
    except OSError as error:
        raise BenchFailed(f"python = {python!r} does not start: {error.strerror}") from None
    return await process.wait() == 0


async def start(command: Sequence[str], log: Path, environ: Mapping[str, str]) -> Process:
    """Start a process with its output in `log`."""
    with log.open("wb") as file:
        return await asyncio.create_subprocess_exec(
            *parent_bound_command(command), stdin=DEVNULL, stdout=file, stderr=STDOUT, env=environ, cwd=log.parent
        )


async def stop(process: Process) -> None:
    """Stop a process with SIGTERM, and with SIGKILL if it does not end."""
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
        try:
            await asyncio.wait_for(process.wait(), _END_S)
        except TimeoutError:
            process.kill()
            await process.wait()


_REMOVES = """
import os, shutil, sys, time
sys.stdin.buffer.read()
for _ in range(300):
    shutil.rmtree(sys.argv[1], ignore_errors=True)
    if not os.path.exists(sys.argv[1]):
        break
    time.sleep(0.1)
"""
"""Program that waits for the end of its input, which is a pipe of the gate, and then until no process writes to the
folder."""


@contextlib.contextmanager
def scratch(parent: Path | None) -> Iterator[Path]:
    """Create a folder in `parent`, by default among the system's temporary files, that only this user can read.

    The folder is removed at the end of the body, and soon after this process was killed.
    """
    folder = Path(tempfile.mkdtemp(prefix="hr-bench-", dir=parent))
    command = [sys.executable, "-I", "-S", "-c", _REMOVES, str(folder)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    ):  # the end of the body closes the input and waits
        yield folder


def scores(results: Path, plays: Sequence[Play], settings: Settings, log: Path) -> Mapping[Play, float]:
    """Return a score from 0 to 1 for each of `plays`. Raises `BenchFailed`, because Trinity's exit status does not show
    failures."""
    scores_by_play: dict[Play, float] = {}
    failed: dict[Play, str] = {}
    for line in results.read_text(encoding="utf-8").splitlines():
        try:
            result = json.loads(line)
            play = Play.model_validate(result["play"])
        except (ValueError, RecursionError) as error:  # a full disk truncates lines
            raise BenchFailed(f"a result cannot be parsed: {error}") from None
        if play not in plays or play in scores_by_play or play in failed:
            raise BenchFailed(f"task {play.task}: was not requested, or has a second result")
        if "error" in result:
            failed[play] = result["error"]
        else:
            scores_by_play[play] = _scaled(result["score"], play, settings)
    if failed:
        play, reason = next(iter(failed.items()))
        raise BenchFailed(
            f"{len(failed)} of {len(plays)} plays failed, the first one being {play.task}: {_truncate(reason)}"
        )
    missing = [play.task for play in plays if play not in scores_by_play]
    if missing:
        problem = f"{len(missing)} of {len(plays)} plays have no result, the first one being {missing[0]}"
        raise BenchFailed(f"{problem}; Trinity's log: {_truncate(last_error(log))}")
    return scores_by_play


def _scaled(value: float, play: Play, settings: Settings) -> float:
    low, high = settings.lowest, settings.highest
    if not (math.isfinite(value) and low <= value <= high):
        name = settings.metric or "reward"
        remedy = "set `lowest` and `highest` to its range, or `metric` to another metric"
        raise BenchFailed(f"task {play.task}: {name} = {value}: must be in {low:g}..{high:g}; {remedy}")
    return (value - low) / (high - low)


def last_error(log: Path) -> str:
    """Return the last error in Trinity's log, else its last line."""
    if not log.exists():
        return "nothing"
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line or "Exception" in line]
    return (errors or lines or ["nothing"])[-1]


def _truncate(text: str) -> str:
    return text if len(text) <= _REASON else f"{text[:_REASON]}..."


class Benches:
    """Runner of benches. `benches` creates it."""

    def __init__(self, settings: Settings, folder: Path, ray_address: str, environ: Mapping[str, str]) -> None:
        self._settings = settings
        self._folder = folder
        self._ray_address = ray_address
        self._environ = environ
        self._slots = asyncio.Semaphore(settings.benches)
        self._number = 0

    async def run(self, version: str, plays: Mapping[Play, Row]) -> Mapping[Play, float]:
        """Return a score for each play. All plays must be of `version`. Raises `BenchFailed`."""
        async with self._slots:
            self._number += 1
            job = Job(self._folder / f"bench-{self._number}", version, self._ray_address, len(plays))
            write_files(self._settings, job, plays)
            try:
                await self._trinity(job)
                return scores(job.results, tuple(plays), self._settings, job.log)
            except BenchFailed as error:
                raise BenchFailed(f"Trinity's bench of {version}: {error}") from None
            finally:
                shutil.rmtree(job.folder, ignore_errors=True)

    async def _trinity(self, job: Job) -> None:
        """Run Trinity to its end. Its exit status has no meaning."""
        command = [self._settings.python, "-m", "trinity.cli.launcher", "run", "--config", str(job.yaml)]
        process = await start(command, job.log, self._environ)
        at_most_s = self._settings.start_timeout_s + plays_timeout_s(self._settings, job)
        try:
            await asyncio.wait_for(process.wait(), at_most_s)
        except TimeoutError:
            raise BenchFailed(f"did not end within {at_most_s:g} s; Trinity's log: {last_error(job.log)}") from None
        finally:
            await stop(process)


def write_files(settings: Settings, job: Job, plays: Mapping[Play, Row]) -> None:
    """Write the files of a bench, which only this user can read."""
    for folder in (job.folder, job.tasks):
        folder.mkdir(mode=0o700)
    rows = (json.dumps({"play": play.model_dump_json(), "row": json.dumps(row)}) for play, row in plays.items())
    for path, text in (
        (job.tasks / "train.jsonl", "".join(f"{row}\n" for row in rows)),
        (job.yaml, as_yaml(configuration(settings, job))),
        (job.results, ""),
    ):
        path.touch(mode=0o600)
        path.write_text(text, encoding="utf-8")


@contextlib.asynccontextmanager
async def benches(settings: Settings, base_url: str) -> AsyncIterator[Benches]:
    """Start Ray and yield a runner. Ray and all files are removed at the end of the body. Raises `BenchFailed`."""
    with scratch(settings.folder) as folder:
        port, agent_port, client_port = _free_ports(3)
        address = f"127.0.0.1:{port}"
        environ = await environment(settings, base_url, folder, address)
        ports = [
            "--port", str(port), "--dashboard-agent-listen-port", str(agent_port),
            "--ray-client-server-port", str(client_port),
        ]  # fmt: skip
        async with _ray(settings, folder, ports, environ):
            yield Benches(settings, folder, address, environ)


@contextlib.asynccontextmanager
async def _ray(
    settings: Settings, folder: Path, ports: Sequence[str], environ: Mapping[str, str]
) -> AsyncIterator[None]:
    """Run a Ray on a single machine without GPUs, because Trinity starts no engine for an external model."""
    command = [
        settings.python, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--node-ip-address", "127.0.0.1",
        *ports, "--temp-dir", str(folder / "ray"), "--include-dashboard", "false", "--disable-usage-stats",
        "--num-cpus", _CPUS, "--num-gpus", "0", "--object-store-memory", _STORE_BYTES,
    ]  # fmt: skip
    log = folder / "ray.log"
    process = await _start_ray(command, log, environ, settings.start_timeout_s)
    try:
        yield
    finally:
        await stop(process)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for free_socket in sockets:
            free_socket.bind(("127.0.0.1", 0))
        return [free_socket.getsockname()[1] for free_socket in sockets]


async def _start_ray(command: Sequence[str], log: Path, environ: Mapping[str, str], timeout_s: float) -> Process:
    """Start Ray, and start it again if it times out. Ray's own limit of half a minute is short on a busy machine."""
    process = None
    try:
        async with asyncio.timeout(timeout_s):
            while process is None or not await _has_started(process, log):
                process = await start(command, log, environ)
            return process
    except BaseException as error:
        if process is not None:
            await stop(process)
        if isinstance(error, TimeoutError):
            raise BenchFailed(f"Ray did not start within start_timeout_s = {timeout_s:g}") from None
        raise


async def _has_started(ray: Process, log: Path) -> bool:
    """Wait until Ray has started. Return False if Ray timed out. Raises `BenchFailed`."""
    while True:
        output = await asyncio.to_thread(log.read_bytes)
        if _STARTED in output:
            return True
        if ray.returncode is not None:
            if _TIMED_OUT in output:
                return False
            raise BenchFailed(f"Ray ended with status {ray.returncode}: {last_error(log)}")
        await asyncio.sleep(_POLL_S)


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
