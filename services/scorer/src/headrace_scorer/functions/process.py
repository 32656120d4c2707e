"""One process of reward functions, seen from the scorer: started, called, and killed when it takes too long."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Sequence

from headrace_runtime.errors import HeadraceError, Unavailable
from headrace_runtime.isolation import reason_of
from headrace_runtime.parent_death import bound_to_parent
from headrace_runtime.program_environment import program_environment
from headrace_scorer.functions.outcomes import Outcome
from headrace_scorer.functions.protocol import LENGTH, CallRequest, LoadRequest, LoadResponse

_LOAD_TIMEOUT_S = 60.0


class FunctionsRefused(HeadraceError):
    """Reward functions cannot be loaded; the message says which and why."""


class FunctionProcess:
    """`start`, `call` one at a time, `stop`. After a time-out or a crash it is `dead` and stays so."""

    def __init__(self, process: asyncio.subprocess.Process, loaded: LoadResponse) -> None:
        self._process = process
        self.loaded = loaded
        self.dead = False

    @classmethod
    async def start(cls, order: LoadRequest, passed_on: Sequence[str] = ()) -> FunctionProcess:
        """`passed_on` names variables of our environment that it gets as well.

        Raises `FunctionsRefused` when the functions cannot be loaded, `Unavailable` when there is no process.
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
        made = cls(process, LoadResponse())
        try:
            async with asyncio.timeout(_LOAD_TIMEOUT_S):
                made.loaded = LoadResponse.model_validate_json(await made._ask(order.model_dump_json().encode()))
        except TimeoutError:
            await made.stop()
            raise FunctionsRefused(f"importing {', '.join(order.specs)} took over {_LOAD_TIMEOUT_S:g} s") from None
        except (EOFError, OSError) as error:
            await made.stop()
            raise Unavailable(f"the process of reward functions ended as it started ({made.status})") from error
        except BaseException:
            await made.stop()
            raise
        if made.loaded.error is not None:
            await made.stop()
            raise FunctionsRefused(made.loaded.error)
        return made

    async def call(self, call: CallRequest, trajectory: bytes, timeout_s: float) -> Outcome:
        """The outcome, even if the function hangs or ends its process."""
        try:
            async with asyncio.timeout(timeout_s):
                return Outcome.model_validate_json(await self._ask(call.model_dump_json().encode(), trajectory))
        except TimeoutError:
            await self.stop()
            return Outcome(outcome="timed_out", reason=f"not done after {timeout_s:g} s")
        except (EOFError, OSError):
            await self.stop()
            return Outcome.failed(f"its process ended ({self.status})")
        except asyncio.CancelledError:
            await self.stop()
            raise
        except Exception as error:  # noqa: BLE001 (what cannot be sent, and an answer that cannot be read)
            await self.stop()
            return Outcome.failed(reason_of(error))

    def digest(self, function: str) -> str | None:
        """The digest of the function's source in this process."""
        return next((f"sha256:{found.digest}" for found in self.loaded.functions if found.name == function), None)

    @property
    def status(self) -> str:
        code = self._process.returncode
        return f"signal {-code}" if code is not None and code < 0 else f"status {code}"

    async def stop(self) -> None:
        """Kill it and everything that it started. Nothing in it has to be saved."""
        self.dead = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await asyncio.shield(self._process.wait())

    async def _ask(self, *messages: bytes) -> bytes:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(b"".join(LENGTH.pack(len(message)) + message for message in messages))
        await self._process.stdin.drain()
        (size,) = LENGTH.unpack(await self._process.stdout.readexactly(LENGTH.size))
        return await self._process.stdout.readexactly(size)
