"""Runs the gate: a program of the user's that plays the held-out tasks against one exact version."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import signal
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Mapping
from typing import Annotated

from pydantic import BaseModel, Field, ValidationError

from headrace_registry.metrics import GATE_SECONDS
from headrace_registry.settings import GateSettings
from headrace_runtime.errors import HeadraceError
from headrace_runtime.leash import leashed

_CHUNK = 65_536
_ERROR_TAIL = 500


class GateFailed(HeadraceError):
    """The gate gave no verdict: exit status, time-out, or output that is not what it should be. Never a score."""

    def __init__(self, message: str, *, timed_out: bool = False) -> None:
        super().__init__(message)
        self.timed_out = timed_out


class Score(BaseModel):
    """One line of the gate's output; further fields are its own business."""

    task: Annotated[str, Field(min_length=1, max_length=512)]
    score: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


class Gate:
    """`gate.command`, for any version and as often as it is asked."""

    def __init__(self, settings: GateSettings) -> None:
        self._settings = settings
        self.configured = bool(settings.command)
        self.sha256 = hashlib.sha256(json.dumps(settings.command).encode()).hexdigest()
        """Names the gate: scores of different gates are not compared."""

    async def play(self, version: str) -> dict[str, float]:
        """Mean score per task. Raises `GateFailed`. Cancelling kills the program and what it started."""
        started = time.monotonic()
        outcome = "cancelled"
        try:
            scores = parse(await self._run(self._command(version)))
            outcome = "scored"
        except GateFailed:
            outcome = "failed"
            raise
        finally:
            GATE_SECONDS.labels(outcome).observe(time.monotonic() - started)
        return scores

    def _command(self, version: str) -> list[str]:
        values = {"{model}": version, "{base_url}": self._settings.base_url, "{python}": sys.executable}
        return [_filled(argument, values) for argument in self._settings.command]

    async def _run(self, command: list[str]) -> bytes:
        process = await asyncio.create_subprocess_exec(
            *leashed(command), stdin=DEVNULL, stdout=PIPE, stderr=PIPE, start_new_session=True
        )
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                output, errors, status = await asyncio.gather(
                    _read(process.stdout, self._settings.output_bytes_max), _tail(process.stderr), process.wait()
                )
        except TimeoutError:
            message = f"not done after gate.timeout_s = {self._settings.timeout_s:g}"
            raise GateFailed(message, timed_out=True) from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        if status:
            raise GateFailed(f"{command[0]} ended with status {status}: {errors or 'no message on stderr'}")
        return output


def _filled(argument: str, values: Mapping[str, str]) -> str:
    for placeholder, value in values.items():
        argument = argument.replace(placeholder, value)
    return argument


def parse(output: bytes) -> dict[str, float]:
    """Mean score per task. Raises `GateFailed` for any line that is no score: half a result is none."""
    found: dict[str, list[float]] = {}
    for number, line in enumerate(output.splitlines(), 1):
        if not line.strip():
            continue
        try:
            score = Score.model_validate_json(line)
        except ValidationError as error:
            first = error.errors(include_input=False, include_url=False)[0]
            where = ".".join(map(str, first["loc"])) or "line"
            raise GateFailed(
                f'line {number} of its output is not {{"task": ..., "score": 0..1}}: {where}: {first["msg"]}'
            ) from None
        found.setdefault(score.task, []).append(score.score)
    if not found:
        raise GateFailed("it printed no score")
    return {task: sum(scores) / len(scores) for task, scores in found.items()}


async def _read(stream: asyncio.StreamReader, limit: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    while chunk := await stream.read(_CHUNK):
        size += len(chunk)
        if size > limit:
            raise GateFailed(f"it printed more than gate.output_bytes_max = {limit}")
        parts.append(chunk)
    return b"".join(parts)


async def _tail(stream: asyncio.StreamReader) -> str:
    last = b""
    while chunk := await stream.read(_CHUNK):
        last = (last + chunk)[-_ERROR_TAIL:]
    return last.decode("utf-8", "replace").strip()
