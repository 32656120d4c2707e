"""Runs a service's own program for a replay, over pipes. A failure always has a reason."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import IO

from headrace.errors import HeadraceError, UsageError
from headrace_operations.supervisor.plan import installed
from headrace_runtime.filters import line_of, parsed
from headrace_runtime.parent_death import bound_to_parent

_LINE_BYTES_MAX = 256 * 1024 * 1024
_BUFFER_BYTES = 1 << 20
_USAGE = 2
"""Exit status of a service whose settings are wrong."""


class Program:
    """`feed` and `lines` at the same time, from two tasks: the program stops reading while nobody reads it."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: IO[bytes]) -> None:
        self._name = name
        self._process = process
        self._log = log

    async def feed(self, word: str, value: bytes) -> None:
        """Waits while the program is busy. Raises what the program failed with."""
        assert self._process.stdin is not None
        self._process.stdin.write(line_of(word, value))
        try:
            await self._process.stdin.drain()
        except ConnectionError:
            await self.ended()
            raise

    def close(self) -> None:
        """Nothing more will be fed."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    async def lines(self) -> AsyncIterator[tuple[str, bytes]]:
        """What the program writes, until it ends. Raises what it failed with."""
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            yield parsed(line)
        await self.ended()

    async def ended(self) -> None:
        """Wait for the end. Raises `UsageError` when its settings are wrong, `HeadraceError` for any other failure."""
        status = await self._process.wait()
        if status:
            self._log.seek(0)
            reason = reason_of(self._log.read().decode("utf-8", "replace").splitlines(), self._name)
            raise (UsageError if status == _USAGE else HeadraceError)(reason or f"{self._name}: exit status {status}")


def reason_of(lines: Sequence[str], name: str) -> str:
    """The last thing that a service said before it ended, without the form that it has in a log."""
    last = next((line for line in reversed(lines) if line.strip()), "")
    try:
        found = json.loads(last)
    except (ValueError, RecursionError):
        return last.removeprefix("headrace ")
    return f"{name}: {found.get('error') or found.get('event')}" if isinstance(found, dict) else last


def module_of(service: str) -> str:
    """The service's module. Raises `UsageError` when it is not installed."""
    info = installed().get(service)
    if info is None:
        raise UsageError(f"the {service} is not installed here, and this needs it: pip install headrace-{service}")
    return info.module


@asynccontextmanager
async def started(service: str, environ: Mapping[str, str], filter_: str = "replay") -> AsyncIterator[Program]:
    """`python -m headrace_<service>.<filter_>`, killed when it is left before it has ended."""
    with tempfile.TemporaryFile() as log:
        command = bound_to_parent([sys.executable, "-m", f"{module_of(service)}.{filter_}"])
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *command, stdin=pipe, stdout=pipe, stderr=log, env=dict(environ), limit=_LINE_BYTES_MAX
        )
        assert process.stdin is not None
        process.stdin.transport.set_write_buffer_limits(high=_BUFFER_BYTES)
        try:
            yield Program(service, process, log)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
