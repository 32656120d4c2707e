"""Handle of one process that runs reward functions: starts it, calls it, and kills it when a call takes too long."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Sequence

from headrace_runtime.errors import HeadraceError, Unavailable
from headrace_runtime.process.parent_death import bound_to_parent
from headrace_runtime.process.programs import program_environment
from headrace_runtime.storage.isolation import reason_of
from headrace_scorer.functions.outcomes import Outcome
from headrace_scorer.functions.protocol import LENGTH, CallRequest, LoadRequest, LoadResponse

_LOAD_TIMEOUT_S = 60.0


class FunctionsRefused(HeadraceError):
    """A reward function cannot be loaded. The message has its spec and the reason."""


class FunctionProcess:
    """A process that runs reward functions, one call at a time. After a time-out or a crash it stays `dead`."""

    def __init__(self, process: asyncio.subprocess.Process, loaded: LoadResponse) -> None:
        self._process = process
        self.loaded = loaded
        self.dead = False

    @classmethod
    async def start(cls, order: LoadRequest, passed_on: Sequence[str] = ()) -> FunctionProcess:
        """Start a process, and load the functions in it.

        Args:
            order: functions to load.
            passed_on: names of environment variables that the process gets besides those of the system.

        Raises:
            FunctionsRefused: the functions cannot be loaded.
            Unavailable: the process ended before it answered.
        """
        command = bound_to_parent([sys.executable, "-m", "headrace_scorer.functions.worker"])
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=pipe,
            stdout=pipe,
            start_new_session=True,
            close_fds=True,
            env=program_environment(passed_on),
        )
        started = cls(process, LoadResponse())
        try:
            async with asyncio.timeout(_LOAD_TIMEOUT_S):
                started.loaded = LoadResponse.model_validate_json(
                    await started._exchange(order.model_dump_json().encode())
                )
        except TimeoutError:
            await started.stop()
            raise FunctionsRefused(f"importing {', '.join(order.specs)} took over {_LOAD_TIMEOUT_S:g} s") from None
        except (EOFError, OSError) as error:
            await started.stop()
            raise Unavailable(f"the process of reward functions ended as it started ({started.status})") from error
        except BaseException:
            await started.stop()
            raise
        if started.loaded.error is not None:
            await started.stop()
            raise FunctionsRefused(started.loaded.error)
        return started

    async def call(self, call: CallRequest, trajectory: bytes, timeout_s: float) -> Outcome:
        """Call a function and return its outcome, also if the function hangs or ends its process."""
        try:
            async with asyncio.timeout(timeout_s):
                return Outcome.model_validate_json(await self._exchange(call.model_dump_json().encode(), trajectory))
        except TimeoutError:
            await self.stop()
            return Outcome(outcome="timed_out", reason=f"not done after {timeout_s:g} s")
        except (EOFError, OSError):
            await self.stop()
            return Outcome.failed(f"its process ended ({self.status})")
        except asyncio.CancelledError:
            await self.stop()
            raise
        except Exception as error:  # noqa: BLE001 (a request that cannot be sent, or an answer that cannot be read)
            await self.stop()
            return Outcome.failed(reason_of(error))

    def digest(self, function: str) -> str | None:
        """Return the digest of the function's source in this process.

        None if the process does not have the function.
        """
        return next((f"sha256:{loaded.digest}" for loaded in self.loaded.functions if loaded.name == function), None)

    @property
    def status(self) -> str:
        """Exit status of the process, or the signal that ended it."""
        code = self._process.returncode
        return f"signal {-code}" if code is not None and code < 0 else f"status {code}"

    async def stop(self) -> None:
        """Kill the process and all processes that it started. Their state does not have to be saved."""
        self.dead = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await asyncio.shield(self._process.wait())

    async def _exchange(self, *messages: bytes) -> bytes:
        """Send messages, and return the answer of the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(b"".join(LENGTH.pack(len(message)) + message for message in messages))
        await self._process.stdin.drain()
        (size,) = LENGTH.unpack(await self._process.stdout.readexactly(LENGTH.size))
        return await self._process.stdout.readexactly(size)
