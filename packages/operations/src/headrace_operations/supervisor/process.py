"""One service as a child process: it is watched, restarted with increasing pauses, and stopped. Its output is logged.

The supervisor owns the listening socket of the service. A client that connects while the gateway restarts waits for the
new process instead of being refused. Together with the usual retries of clients, a killed gateway causes only a delay.
The socket is passed as in sd_listen_fds(3) of systemd.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

from headrace_operations.supervisor.plan import ServicePlan
from headrace_operations.supervisor.state import ServiceState, Status, request_health
from headrace_runtime.process.liveness import VARIABLE, LivenessWatch
from headrace_runtime.process.parent_death import parent_bound_command
from headrace_runtime.storage.disk import open_for_owner, private_folder

_BACKLOG = 2048


class ListeningSocket:
    """Listening socket of a service, which survives restarts of the service.

    Call `open` before each start of the service, and `close` before the service stops for good.
    """

    def __init__(self, host: str, port: int) -> None:
        self._address = (host, port)
        self._listener: socket.socket | None = None

    def open(self) -> int | None:
        """Open the socket if it is not open, and return its file descriptor.

        Returns:
            The file descriptor, or None if the address is not available. The service then binds the address itself and
            reports the reason.
        """
        if self._listener is None:
            family = socket.AF_INET6 if ":" in self._address[0] else socket.AF_INET
            with contextlib.suppress(OSError):
                self._listener = socket.create_server(self._address, family=family, backlog=_BACKLOG)
        return self._listener.fileno() if self._listener else None

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None


BACKGROUND_NICENESS = 5
"""Niceness of background services above that of the others: about a third of their share of a busy processor."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Time limits of a supervisor, and limits of the sizes of log files."""

    first_pause_s: float = 0.5
    """Pause before the first restart; it doubles with each further early exit."""
    pause_max_s: float = 15.0
    stable_s: float = 60.0
    """A service that ran this long restarts after `first_pause_s` again."""
    stop_timeout_s: float = 25.0
    """Seconds after which services that have not stopped are killed."""
    health_interval_s: float = 0.2
    """Interval of health checks of a service that is not ready; a ready service is checked a tenth as often."""
    health_timeout_s: float = 1.0
    unanswered_s: float = 8.0
    """A service whose health check has not been answered for this time is `unready`."""
    hung_s: float = 5.0
    """A service without a sign of life for this time is `hung`."""
    hang_timeout_s: float = 30.0
    """A service without a sign of life for this time is killed and restarted."""
    start_timeout_s: float = 180.0
    """Limit instead of `hang_timeout_s` for a process that has not answered yet, because it may import and load."""
    log_bytes_max: int = 20_000_000
    log_backups: int = 3


def yield_processor(pid: int) -> None:
    """Lower the scheduling priority (raise the niceness) of a process that has just started.

    All processes that it starts later inherit this priority.
    """
    with contextlib.suppress(OSError):  # it has ended
        os.setpriority(os.PRIO_PROCESS, pid, min(os.getpriority(os.PRIO_PROCESS, 0) + BACKGROUND_NICENESS, 19))


class ManagedProcess:
    """A service with its present process, across restarts.

    Only the supervisor's thread may use it, because child processes end with the thread that started them.
    """

    def __init__(self, plan: ServicePlan, environ: Mapping[str, str], log: LogFile, limits: Limits) -> None:
        self.plan = plan
        self.log = log
        self._environ = environ
        self._limits = limits
        self._socket = ListeningSocket(plan.host, plan.port) if plan.keeps_socket else None
        self._liveness = LivenessWatch()
        self._process: subprocess.Popen[bytes] | None = None
        self._copier: threading.Thread | None = None
        self._status: Status = "stopped"
        self._lacks: tuple[str, ...] = ()
        self._since = datetime.now(UTC)
        self._started_s = 0.0
        self._restart_s = 0.0
        self._check_s = 0.0
        self._answered_s: float | None = None
        self.has_answered = False
        """Whether one of its processes has answered a health check."""
        self._quick_deaths = 0
        self._restarts = 0

    @property
    def state(self) -> ServiceState:
        return ServiceState(
            status=self._status,
            lacks=self._lacks,
            pid=self._process.pid if self._process else None,
            url=self.plan.url,
            port=self.plan.port,
            log=str(self.log.path),
            restarts=self._restarts,
            since=self._since,
        )

    @property
    def running(self) -> bool:
        return self._process is not None

    @property
    def ready(self) -> bool:
        return self._status == "ready"

    def start(self) -> None:
        """Start the process.

        Raises:
            OSError: the system has no room for another process or thread, or the interpreter is missing.
        """
        self._started_s = time.monotonic()
        listener = self._socket.open() if self._socket else None
        liveness = self._liveness.open()
        self._process = subprocess.Popen(
            parent_bound_command([self.plan.python, "-m", self.plan.module], listener),
            pass_fds=(liveness,) if listener is None else (liveness, listener),
            env={**self._environ, VARIABLE: str(liveness)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            umask=0o077,
        )
        if self.plan.info.is_background:
            yield_processor(self._process.pid)
        assert self._process.stdout is not None
        enlarge_pipe(self._process.stdout)
        try:
            self._copier = self.log.follow(self._process.stdout)
        except RuntimeError as error:
            self.kill()
            self._process.wait()
            self._process = None
            raise OSError(errno.EAGAIN, str(error)) from error
        self._liveness.started(self._started_s)
        self._answered_s = None
        self._set_status("starting")

    def reap(self) -> int | None:
        """Return the exit status of the process if it has ended (negative for a signal), otherwise None.

        Remaining processes of its group are killed.
        """
        if self._process is None or (status := self._process.poll()) is None:
            return None
        self._signal(signal.SIGKILL)
        if self._copier is not None:
            self._copier.join(1.0)  # copy its last output
        self._process = None
        return status

    def plan_restart(self) -> float:
        """Schedule the next start and return the pause before it."""
        lived_s = time.monotonic() - self._started_s
        self._quick_deaths = 0 if lived_s > self._limits.stable_s else self._quick_deaths + 1
        pause_s = min(self._limits.first_pause_s * 2.0 ** max(0, self._quick_deaths - 1), self._limits.pause_max_s)
        self._restart_s = time.monotonic() + pause_s
        self._restarts += 1
        self._set_status("restarting")
        return pause_s

    def is_restart_time(self) -> bool:
        return self._process is None and self._status == "restarting" and time.monotonic() >= self._restart_s

    def check_liveness(self) -> str | None:
        """Kill the process if it has hung for too long. A hanging process would not react to SIGTERM.

        Returns:
            A message if the process has begun to hang or is killed; otherwise None.
        """
        if self._process is None:
            return None
        self._liveness.poll(time.monotonic())
        silent_s, was_hung = self._liveness.silent_s, self._status == "hung"
        if silent_s > (self._limits.start_timeout_s if self._answered_s is None else self._limits.hang_timeout_s):
            self._liveness.note_sign_of_life()  # the new process gets the full time
            self._set_status("hung")
            self.kill()
            return f"hangs: no sign of life for {silent_s:.0f} s; killing process {self._process.pid}"
        if self._answered_s is None:
            return None
        if silent_s <= self._limits.hung_s:
            if was_hung:
                self._set_status("unready", "answer")  # until the next health check gives the reason
                self._check_s = 0.0
            return None
        self._set_status("hung")
        return None if was_hung else f"hangs: no sign of life for {silent_s:.0f} s"

    def check_health(self) -> None:
        """Request `/health` of the service if a check is due, and store the result.

        A process that sends no sign of life gets no request.
        """
        if self._process is None or time.monotonic() < self._check_s:
            return
        silent = self._liveness.beats and self._liveness.silent_s > self._limits.health_timeout_s * 2
        answer = None if silent else request_health(self.plan.url, self._limits.health_timeout_s)
        now_s = time.monotonic()
        if answer is not None:
            ok, lacks = answer
            self._liveness.note_sign_of_life()
            self._answered_s, self.has_answered = now_s, True
            self._set_status("ready" if ok else "unready", *lacks)
        elif self._is_unanswered(now_s) and self._status != "hung":
            self._set_status("unready", "answer")
        check_rarely = self.ready or (answer is None and self._answered_s is not None)
        self._check_s = now_s + self._limits.health_interval_s * (10 if check_rarely else 1)

    def terminate(self) -> None:
        """Send SIGTERM to the process, or SIGKILL if it hangs, because a hanging process cannot handle SIGTERM."""
        if self._socket is not None:
            self._socket.close()
        if self._status == "hung":
            self.kill()
        self._signal(signal.SIGTERM, group=False)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def stopped(self) -> bool:
        """Return whether the process has ended and will not be restarted."""
        if self.reap() is not None or self._process is None:
            self._set_status("stopped")
        return self._process is None

    def _is_unanswered(self, now_s: float) -> bool:
        return self._answered_s is not None and now_s - self._answered_s > self._limits.unanswered_s

    def _set_status(self, status: Status, *lacks: str) -> None:
        self._lacks = lacks if status in ("ready", "unready") else ()
        if self._status != status:
            self._status = status
            self._since = datetime.now(UTC)

    def _signal(self, number: signal.Signals, *, group: bool = True) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                (os.killpg if group else os.kill)(self._process.pid, number)


_LINE_BYTES_MAX = 65_536
_TAIL_LINES = 20
_PIPE_BYTES = 1 << 20


def enlarge_pipe(pipe: IO[bytes]) -> None:
    """Enlarge the buffer of a pipe (Linux only), so that a service can go on writing while the supervisor is
    suspended.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)


class LogFile:
    """Copies the output of a process to a file that is rotated at `bytes_max`, with `backups` older files.

    While the disk is full, lines are counted and dropped, so that the service is never blocked. A line with their
    number precedes the next line that is written.
    """

    def __init__(self, path: Path, bytes_max: int, backups: int) -> None:
        self.path = path
        self._bytes_max = bytes_max
        self._backups = backups
        self._lost_lines = 0
        self._cause = ""
        self.tail: deque[str] = deque(maxlen=_TAIL_LINES)
        """The last lines, to report why the process ended."""
        private_folder(path.parent)

    def follow(self, pipe: IO[bytes]) -> threading.Thread:
        """Copy the pipe in a separate thread until its writers close it."""
        thread = threading.Thread(target=self._copy, args=(pipe,), name=f"log-{self.path.stem}", daemon=True)
        thread.start()
        return thread

    def _copy(self, pipe: IO[bytes]) -> None:
        with pipe:
            while line := pipe.readline(_LINE_BYTES_MAX):
                self.tail.append(line.decode("utf-8", "replace").rstrip())
                self.write(line)

    def write(self, line: bytes) -> None:
        """Append a line, after a note about lost lines. Errors of the disk are not raised."""
        try:
            if self._lost_lines:
                self._append(f"headrace: {self._lost_lines} lines were lost here: {self._cause}\n".encode())
                self._lost_lines = 0
            self._append(line)
        except OSError as error:
            self._lost_lines += 1
            self._cause = f"disk: {(error.strerror or str(error)).lower()} on {self.path.parent}"

    def _append(self, line: bytes) -> None:
        size = self.path.stat().st_size if self.path.exists() else 0
        if size and size + len(line) > self._bytes_max:
            self._rotate()
            size = 0
        with open(self.path, "ab", buffering=0, opener=open_for_owner) as file:
            try:
                if file.write(line) < len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                file.truncate(size)  # remove the partial line
                raise

    def _rotate(self) -> None:
        for number in range(self._backups, 0, -1):
            older = self.path.with_name(f"{self.path.name}.{number}")
            newer = self.path if number == 1 else self.path.with_name(f"{self.path.name}.{number - 1}")
            if newer.exists():
                newer.replace(older)
        if not self._backups:
            self.path.unlink(missing_ok=True)
