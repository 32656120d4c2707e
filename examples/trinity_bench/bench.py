"""Runner of Trinity's benches: one local Ray for all of them, a `trinity run` for each, and a score for each play."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import shutil
import socket
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

from headrace_schemas.programs import Play
from trinity_bench.processes import BenchFailed, environment, scratch, start, stop
from trinity_bench.settings import Job, Row, Settings, as_yaml, configuration, plays_timeout_s

_TAIL_BYTES = 20_000
_REASON = 300
_STARTED, _TIMED_OUT = b"Ray runtime started", b"timed out during startup"
_POLL_S = 0.1
_CPUS = "2"
"""CPUs that Ray reserves, and processes that it starts in advance. Trinity's explorer takes one CPU, and runners
none."""
_STORE_BYTES = "100000000"


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
