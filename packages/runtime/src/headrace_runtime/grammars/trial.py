"""Trial compilation of a grammar in a process that can be killed.

The grammar library bounds most of its work by fuel, but not all: a schema of 180 bytes can take minutes and gigabytes,
and a thread cannot be stopped. So each new grammar is compiled in a process first. A schema that takes too long, or
that ends the process, is refused, and the replica compiles only what is known to end. Run as `python -m`, the module is
that process: four bytes of length, then the grammar; the answer is one byte.
"""

from __future__ import annotations

import contextlib
import os
import select
import struct
import subprocess
import sys

from headrace_runtime.process.parent_death import bound_to_parent
from headrace_runtime.process.programs import program_environment

_LENGTH = struct.Struct(">I")
_START_TIMEOUT_S = 60.0
_MEMORY_BYTES_MAX = 2 << 30
_DONE = b"."


class TrialFailed(Exception):
    """Raised when compiling a grammar in a separate process has ended that process, for example for lack of memory."""


class TrialTimedOut(TrialFailed):
    """The compilation took too long."""


class GrammarTrial:
    """Child process that compiles grammars on trial. Not thread-safe.

    The process ends with the thread that made its first trial.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, text: str, timeout_s: float) -> None:
        """Compile a grammar on trial, and return normally for an invalid one, too. Blocks.

        Raises:
            TrialTimedOut: the compilation took longer than `timeout_s`.
            TrialFailed: the compilation ended the process.
            RuntimeError: the process does not start.
        """
        process = self._ensure_running()
        assert process.stdin is not None
        content = text.encode()
        try:
            process.stdin.write(_LENGTH.pack(len(content)) + content)
            process.stdin.flush()
        except OSError:
            self.stop()
            raise TrialFailed from None
        self._wait(process, timeout_s)

    def stop(self) -> None:
        """Kill the process. The next trial starts another one."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            with contextlib.suppress(OSError), process:
                process.wait()

    def _ensure_running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self.stop()
        process = self._process = subprocess.Popen(
            bound_to_parent([sys.executable, "-m", "headrace_runtime.grammars.trial"]),
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=program_environment(),
        )
        try:
            self._wait(process, _START_TIMEOUT_S)
        except TrialFailed:
            raise RuntimeError("the process for trials of grammars does not start; its error is in the log") from None
        return process

    def _wait(self, process: subprocess.Popen[bytes], timeout_s: float) -> None:
        """Wait until the child process reports by one byte that it is ready for a grammar."""
        assert process.stdout is not None
        poll = select.poll()  # `select.select` takes no descriptor above 1,023
        poll.register(process.stdout, select.POLLIN)
        if not poll.poll(timeout_s * 1000):
            self.stop()
            raise TrialTimedOut
        if process.stdout.read(1) != _DONE:
            self.stop()
            raise TrialFailed


def _serve() -> None:
    """Compile the grammars that arrive on standard input, until it is closed."""
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

    _limit_process()
    words = LLTokenizer("byte")
    inbox, outbox = sys.stdin.buffer, sys.stdout.buffer
    while True:
        outbox.write(_DONE)
        outbox.flush()
        header = inbox.read(_LENGTH.size)
        if len(header) < _LENGTH.size:
            return
        text = inbox.read(*_LENGTH.unpack(header)).decode()
        matcher = LLMatcher(words, text, log_level=0, limits=LLParserLimits(verbose_errors=False))
        if not matcher.is_error():
            with contextlib.suppress(Exception):  # the replica names the error
                matcher.compute_bitmask()


def _limit_process() -> None:
    """Bound the memory of this process, and give it a lower CPU priority than the replica."""
    os.nice(5)
    if sys.platform == "linux":
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES_MAX, _MEMORY_BYTES_MAX))


if __name__ == "__main__":
    _serve()
