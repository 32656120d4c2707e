"""Temporary folder of a gate. The registry ends gates with SIGKILL, so that another process must remove it."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

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
