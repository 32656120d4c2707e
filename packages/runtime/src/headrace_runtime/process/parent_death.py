"""Script that starts a child process which the kernel kills when its parent ends, even if the parent is killed.

Usage as a script: `python parent_death.py PARENT LISTENER COMMAND...`. It requests SIGKILL at the parent's death from
Linux and then executes COMMAND. LISTENER is the descriptor of an open socket that COMMAND inherits, or -1 for none, by
the protocol of systemd (sd_listen_fds(3)). The signal follows the death of the parent's *thread*, so start the child
from a thread that lives long enough. On other systems than Linux the script only executes the command.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1
_SIGKILL = 9
_FIRST_HANDED_OVER = 3  # SD_LISTEN_FDS_START
_LIVENESS = "LIVENESS_FD"
"""Same value as `liveness.VARIABLE`, because this script must not import other modules."""


def parent_bound_command(command: Sequence[str], listener: int | None = None) -> list[str]:
    """Return a command line that runs `command` as a process which the kernel kills when this process ends (on Linux
    only).

    Start the command line from a thread that lives as long as the child should.

    Args:
        command: the command.
        listener: file descriptor of an open socket that the command inherits, or None. The caller must pass the
            descriptor on to the child.
    """
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(-1 if listener is None else listener), *command]


def _main(parent: int, listener: int, command: list[str]) -> None:
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # the parent died before the request
            os._exit(1)
    if listener >= 0:
        _hand_over(listener)
    try:
        os.execvp(command[0], command)  # noqa: S606 (a list, no shell)
    except OSError as error:
        sys.stderr.write(f"{command[0]}: {error.strerror}\n")
        os._exit(127)


def _hand_over(listener: int) -> None:
    """Move a listening socket to the file descriptor at which the started command expects it."""
    if os.environ.get(_LIVENESS) == str(_FIRST_HANDED_OVER):  # the liveness pipe occupies the socket's descriptor
        os.environ[_LIVENESS] = str(pipe := os.dup(_FIRST_HANDED_OVER))
        os.set_inheritable(pipe, True)
    os.dup2(listener, _FIRST_HANDED_OVER)
    if listener != _FIRST_HANDED_OVER:
        os.close(listener)
    os.environ.update(LISTEN_FDS="1", LISTEN_PID=str(os.getpid()))


if __name__ == "__main__":
    _main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
