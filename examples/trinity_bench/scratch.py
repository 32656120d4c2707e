"""A folder for one gate. The registry ends gates with SIGKILL, so another process removes it."""

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
"""Waits for the end of its input, which is ours, and then for whoever still writes there to be gone, too."""


@contextlib.contextmanager
def scratch(parent: Path | None) -> Iterator[Path]:
    """A new one in `parent`, which only this user can read; none: where the system has temporary files. It is gone when
    the body ends, and soon after this process was killed.
    """
    folder = Path(tempfile.mkdtemp(prefix="hr-bench-", dir=parent))
    command = [sys.executable, "-I", "-S", "-c", _REMOVES, str(folder)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    ):  # which ends its input, and waits
        yield folder
