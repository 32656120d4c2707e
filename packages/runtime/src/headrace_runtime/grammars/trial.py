"""Test compilation of grammars in a child process that can be killed.

The grammar library limits most of its work, but not all: a schema of 180 bytes can take minutes and gigabytes, and a
thread cannot be stopped. So each new grammar is first compiled in a child process. A grammar that takes too long, or
that ends the child process, is refused; the replica itself compiles only grammars that passed this test. Run with
`python -m`, this module is the child process. It reads four bytes with a length and then the grammar, and writes one
byte as its answer.
"""

from __future__ import annotations

import contextlib
import os
import select
import struct
import subprocess
import sys

from headrace_runtime.process.parent_death import parent_bound_command
from headrace_runtime.process.programs import program_environment

_LENGTH = struct.Struct(">I")
_START_TIMEOUT_S = 60.0
_MEMORY_BYTES_MAX = 2 << 30
_DONE = b"."


class TrialFailed(Exception):
    """Raised if compiling a grammar ended the child process, for example for lack of memory."""


class TrialTimedOut(TrialFailed):
    """Raised if compiling a grammar took longer than the time limit."""


class GrammarTrial:
    """Child process that compiles grammars as a test. Not thread-safe.

    The process is killed when the thread that started it ends, because the kernel watches that thread.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, text: str, timeout_s: float) -> None:
        """Compile a grammar in the child process. An invalid grammar is no error here. Blocks.

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
        """Kill the child process. The next test starts another one."""
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
            parent_bound_command([sys.executable, "-m", "headrace_runtime.grammars.trial"]),
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
        """Wait until the child process sends the byte that reports that it is ready, or that it has compiled a
        grammar."""
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
            with contextlib.suppress(Exception):  # the replica reports the error
                matcher.compute_bitmask()


def _limit_process() -> None:
    """Limit the memory of this process, and give it a lower CPU priority than the replica."""
    os.nice(5)
    if sys.platform == "linux":
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES_MAX, _MEMORY_BYTES_MAX))


if __name__ == "__main__":
    _serve()
