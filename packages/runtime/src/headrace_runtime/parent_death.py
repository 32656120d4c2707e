"""Starts a child process that ends when its parent ends, also when the parent is killed.

Run as a script: `python parent_death.py PARENT LISTENER COMMAND...` asks Linux for SIGKILL at the parent's death, then
becomes COMMAND. LISTENER is an open socket that it is handed, -1 for none, as systemd does it: sd_listen_fds(3).
The kernel means the parent's *thread*: start such children from one that lives as long as they shall. Elsewhere than on
Linux the command just runs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1
_SIGKILL = 9
_FIRST_HANDED_OVER = 3  # SD_LISTEN_FDS_START
_LIVENESS = "LIVENESS_FD"
"""`liveness.VARIABLE`; a script imports nothing of ours."""


def bound_to_parent(command: Sequence[str], listener: int | None = None) -> list[str]:
    """`command`, to be started by this process as its own child, which has to pass on the descriptor `listener`."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(-1 if listener is None else listener), *command]


def _main(parent: int, listener: int, command: list[str]) -> None:
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died before we asked
            os._exit(1)
    if listener >= 0:
        _hand_over(listener)
    try:
        os.execvp(command[0], command)  # noqa: S606 (a list, no shell)
    except OSError as error:
        sys.stderr.write(f"{command[0]}: {error.strerror}\n")
        os._exit(127)


def _hand_over(listener: int) -> None:
    if os.environ.get(_LIVENESS) == str(_FIRST_HANDED_OVER):  # in the way of the socket
        os.environ[_LIVENESS] = str(pipe := os.dup(_FIRST_HANDED_OVER))
        os.set_inheritable(pipe, True)
    os.dup2(listener, _FIRST_HANDED_OVER)
    if listener != _FIRST_HANDED_OVER:
        os.close(listener)
    os.environ.update(LISTEN_FDS="1", LISTEN_PID=str(os.getpid()))


if __name__ == "__main__":
    _main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
