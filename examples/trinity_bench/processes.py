"""Processes of Trinity's environment and the temporary folder of a gate, which end with this process, however it ends.

The registry ends gates with SIGKILL, so that another process must remove the folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import subprocess
import sys
import tempfile
from asyncio.subprocess import DEVNULL, STDOUT, Process
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from headrace_runtime.process.parent_death import parent_bound_command
from trinity_bench.settings import Settings

_HERE = Path(__file__).parent
_END_S = 20.0


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
