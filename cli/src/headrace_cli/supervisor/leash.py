"""A service that cannot outlive its supervisor, however that one ends.

Run as a script: `python leash.py PARENT LISTENER COMMAND...` asks Linux for SIGKILL at the parent's death, then becomes
COMMAND. LISTENER is an open socket that it is handed (see `door`), -1 for none.
The kernel means the parent's *thread*, so the supervisor starts everything from the one that watches. Elsewhere than on
Linux there is no leash. (The runtime has the same for its own children; neither package may import the other.)
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1
_SIGKILL = 9
_FIRST_HANDED_OVER = 3  # SD_LISTEN_FDS_START
_LIVENESS = "LIVENESS_FD"
"""`pulse.VARIABLE`; a script imports nothing of ours."""


def leashed(command: Sequence[str], listener: int | None = None) -> list[str]:
    """`command`, to be started by this process as its own child, which has to pass on the descriptor `listener`."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(-1 if listener is None else listener), *command]


def _main(parent: int, listener: int, command: list[str]) -> None:
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died before we asked
            os._exit(1)
    if listener >= 0:
        if os.environ.get(_LIVENESS) == str(_FIRST_HANDED_OVER):  # in the way of the socket
            os.environ[_LIVENESS] = str(pipe := os.dup(_FIRST_HANDED_OVER))
            os.set_inheritable(pipe, True)
        os.dup2(listener, _FIRST_HANDED_OVER)
        if listener != _FIRST_HANDED_OVER:
            os.close(listener)
        os.environ.update(LISTEN_FDS="1", LISTEN_PID=str(os.getpid()))
    os.execvp(command[0], command)  # noqa: S606 (a list, no shell)


if __name__ == "__main__":
    _main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
