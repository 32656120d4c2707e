"""A child process that cannot outlive the process that started it, however that one ends.

Run as a script: `python leash.py PARENT COMMAND...` asks Linux for SIGKILL at the parent's death, then becomes COMMAND.
The kernel means the parent's *thread*: start leashed children from one that lives as long as they shall. Elsewhere than
on Linux the command runs without a leash.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1
_SIGKILL = 9


def leashed(command: Sequence[str]) -> list[str]:
    """`command`, to be started by this process as its own child."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def _main(parent: int, command: list[str]) -> None:
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died before we asked
            os._exit(1)
    try:
        os.execvp(command[0], command)  # noqa: S606 (a list, no shell)
    except OSError as error:
        sys.stderr.write(f"{command[0]}: {error.strerror}\n")
        os._exit(127)


if __name__ == "__main__":
    _main(int(sys.argv[1]), sys.argv[2:])
