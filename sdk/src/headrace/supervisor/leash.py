"""A service that cannot outlive its supervisor, however that one ends.

Run as a script: `python leash.py PARENT COMMAND...` asks Linux for SIGKILL at the parent's death, then becomes COMMAND.
The kernel means the parent's *thread*, so the supervisor starts everything from the one that watches. Elsewhere than on
Linux there is no leash. (The runtime has the same for its own children; neither package may import the other.)
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
    os.execvp(command[0], command)  # noqa: S606 (a list, no shell)


if __name__ == "__main__":
    _main(int(sys.argv[1]), sys.argv[2:])
