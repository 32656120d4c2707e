"""One service as a process: started on a leash, watched, restarted with growing pauses, stopped for sure."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from headrace.supervisor.asking import ask
from headrace.supervisor.door import Door
from headrace.supervisor.leash import leashed
from headrace.supervisor.log_file import LogFile
from headrace.supervisor.plan import ServicePlan
from headrace.supervisor.state import ServiceState, Status


@dataclass(frozen=True, slots=True)
class Limits:
    """The bounds of a supervisor."""

    first_pause_s: float = 0.5
    """Pause before the first restart; it doubles with each death in quick succession."""
    pause_max_s: float = 15.0
    stable_s: float = 60.0
    """A service that lived this long starts again with `first_pause_s`."""
    stop_timeout_s: float = 25.0
    """How long services may take to stop before they are killed."""
    health_interval_s: float = 0.2
    """Pause between two looks at a service that is not ready; at one that is, ten times as long."""
    health_timeout_s: float = 1.0
    log_bytes_max: int = 20_000_000
    log_backups: int = 3


class ManagedProcess:
    """A service over all its lives. Used by the supervisor's thread alone: the leash is tied to that thread."""

    def __init__(self, plan: ServicePlan, environ: Mapping[str, str], log: LogFile, limits: Limits) -> None:
        self.plan = plan
        self.log = log
        self._environ = environ
        self._limits = limits
        self._door = Door(plan.host, plan.port) if plan.held else None
        self._process: subprocess.Popen[bytes] | None = None
        self._copier: threading.Thread | None = None
        self._status: Status = "stopped"
        self._lacks: tuple[str, ...] = ()
        self._since = datetime.now(UTC)
        self._started_s = 0.0
        self._restart_s = 0.0
        self._check_s = 0.0
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
        listener = self._door.open() if self._door else None
        self._process = subprocess.Popen(
            leashed([sys.executable, "-m", self.plan.module], listener),
            pass_fds=() if listener is None else (listener,),
            env=dict(self._environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            umask=0o077,
        )
        assert self._process.stdout is not None
        self._copier = self.log.follow(self._process.stdout)
        self._started_s = time.monotonic()
        self._become("starting")

    def died(self) -> int | None:
        """The exit status when it has just ended (negative: the signal), else None. What it left behind is killed."""
        if self._process is None or (status := self._process.poll()) is None:
            return None
        self._signal(signal.SIGKILL)
        if self._copier is not None:
            self._copier.join(1.0)  # its last words
        self._process = None
        return status

    def plan_restart(self) -> float:
        """Decide when it starts again; returns the pause."""
        lived_s = time.monotonic() - self._started_s
        self._quick_deaths = 0 if lived_s > self._limits.stable_s else self._quick_deaths + 1
        pause_s = min(self._limits.first_pause_s * 2.0 ** max(0, self._quick_deaths - 1), self._limits.pause_max_s)
        self._restart_s = time.monotonic() + pause_s
        self._restarts += 1
        self._become("restarting")
        return pause_s

    def restart_is_due(self) -> bool:
        return self._process is None and self._status == "restarting" and time.monotonic() >= self._restart_s

    def check_health(self) -> None:
        """Ask its `/health`, unless that was done just now."""
        if self._process is None or time.monotonic() < self._check_s:
            return
        answer = ask(self.plan.url, self._limits.health_timeout_s)
        if answer is not None:
            ok, self._lacks = answer
            self._become("ready" if ok else "unready")
        self._check_s = time.monotonic() + self._limits.health_interval_s * (10 if self.ready else 1)

    def terminate(self) -> None:
        """Ask it to stop; `kill` what has not after a while."""
        if self._door is not None:
            self._door.close()
        self._signal(signal.SIGTERM, group=False)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def stopped(self) -> bool:
        """Whether its process is gone for good."""
        if self.died() is not None or self._process is None:
            self._become("stopped")
        return self._process is None

    def _become(self, status: Status) -> None:
        self._lacks = self._lacks if status in ("ready", "unready") else ()
        if self._status != status:
            self._status = status
            self._since = datetime.now(UTC)

    def _signal(self, number: signal.Signals, *, group: bool = True) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                (os.killpg if group else os.kill)(self._process.pid, number)
