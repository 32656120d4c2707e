"""Supervisor of all services of a data directory."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Self

from headrace_operations.supervisor import plan as planning
from headrace_operations.supervisor.overrides import Overrides
from headrace_operations.supervisor.process import Limits, LogFile, ManagedProcess
from headrace_operations.supervisor.state import Lock, RunState, StartFailed, touch
from headrace_runtime.services import ServiceInfo
from headrace_schemas.http.stack_access import BusLogin, make_token, remember_key, remember_login

_TICK_S = 0.05
_TOUCH_S = 1.0
_SETTINGS_STATUS = 2
"""Exit status of a service whose settings are invalid. At its first start a restart cannot help."""


class Supervisor:
    """Supervisor of all services. As a context manager it starts them, waits until they are ready, and stops them.

    All methods may be called from any thread. The broker is left out if `bus.address` is set, the judge without
    `judge.endpoint.base_url`, and the trainer without `trainer.base`.

    Args:
        data_dir: the data directory; None takes the setting `data_dir`.
        config: settings file.
        settings: settings by dotted name, such as `{"gateway.port": 8100}`; they override environment and file.
        only: names of the services to start; empty starts all.
        without: names of services not to start.
        auto_ports: choose a free port for each service whose port is not set.
        pythons: interpreter by service, for services with their own environment.
        environ: environment of the services; None takes that of this process.
        services: the installed services; None finds them.
        limits: time limits and sizes.
        report: function that is called with one line for each event of a service.

    Raises:
        UsageError: the services cannot be started with these settings, or another supervisor runs.
    """

    def __init__(
        self,
        data_dir: Path | None = None,
        *,
        config: Path | None = None,
        settings: Mapping[str, object] | None = None,
        only: Collection[str] = (),
        without: Collection[str] = (),
        auto_ports: bool = False,
        pythons: Mapping[str, str] | None = None,
        environ: Mapping[str, str] | None = None,
        services: Mapping[str, ServiceInfo] | None = None,
        limits: Limits | None = None,
        report: Callable[[str], None] = lambda line: None,
    ) -> None:
        overrides = Overrides(config, settings or {}, os.environ if environ is None else environ)
        installed_services = planning.installed() if services is None else services
        folder = planning.data_dir_of(data_dir, overrides)
        self._lock = Lock(folder)
        self._lock.take()
        try:
            token = make_token(folder)
            self.plan = planning.make(
                data_dir,
                overrides,
                installed_services,
                only=only,
                without=without,
                auto_ports=auto_ports,
                pythons=pythons,
                token=token,
            )
            self.internal_key = str(overrides.get("security.internal_key"))
            """Key of internal requests. It must not appear in logs and arguments."""
        except BaseException:
            self._lock.release()
            raise
        self.data_dir = self.plan.data_dir
        self._state_file = self.data_dir / "run" / "state.json"
        self._limits = limits or Limits()
        self._report = report
        self._started_at = datetime.now(UTC)
        self._processes = {service.name: self._process(service) for service in self.plan.services}
        self._thread = threading.Thread(target=self._supervise, name="headrace-supervisor", daemon=True)
        self._stop = threading.Event()
        self._kill_now = threading.Event()
        self._changed = threading.Condition()
        self._state = self._snapshot()
        for service in self._state.services.values():
            remember_key(service.url, self.internal_key)
        login = overrides.bus_settings(self.plan.bus)
        remember_login(self.plan.bus, BusLogin(login.username, login.password.get_secret_value(), login.mechanism))
        self._state_file.unlink(missing_ok=True)  # left by a supervisor that was killed
        self._failure: str | None = None
        self._finished = False
        self._write_failed = False
        self._next_touch_s = 0.0

    # interface

    def start(self) -> None:
        """Start the supervisor's thread and return at once."""
        self._thread.start()

    def wait_up(self, timeout_s: float = 120.0) -> RunState:
        """Wait until every service answers.

        Raises:
            StartFailed: a service did not answer in time. All services were stopped.
        """
        return self._wait_for(lambda state: state.up, timeout_s, "does not answer")

    def wait_ready(self, timeout_s: float = 120.0) -> RunState:
        """Wait until every service can work; the gateway cannot before a model is served.

        Raises:
            StartFailed: a service was not ready in time. All services were stopped.
        """
        return self._wait_for(lambda state: state.ready, timeout_s, "is not ready")

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait at most `timeout_s` for all services to stop, and return whether they have.

        Raises:
            StartFailed: a service caused the stop.
        """
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return False
        if self._failure is not None:
            raise StartFailed(self._failure)
        return True

    def stop(self) -> None:
        """Stop every service, the broker last, and wait for all of them. Further calls do nothing."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._lock.release()

    def begin_stop(self, *, now: bool = False) -> None:
        """Begin to stop without waiting; a signal handler may call it.

        `now` kills services that have not stopped yet.
        """
        if now:
            self._kill_now.set()
        self._stop.set()

    @property
    def state(self) -> RunState:
        """State of all services at present."""
        return self._state

    @property
    def pids(self) -> dict[str, int]:
        """Process id of each service that runs."""
        return {name: state.pid for name, state in self._state.services.items() if state.pid is not None}

    @property
    def base_url(self) -> str:
        """URL of the gateway's API, for `OpenAI(base_url=...)`."""
        return self._state.base_url or ""

    def url(self, service: str) -> str:
        """Return the root URL of a service."""
        return self._state.services[service].url

    def __enter__(self) -> Self:
        self.start()
        self.wait_ready()
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.stop()

    # supervisor thread

    def _supervise(self) -> None:
        try:
            broker = [process for process in self._processes.values() if process.plan.info.is_bus]
            self._start(broker)
            while not self._stop.is_set() and not all(process.ready for process in broker):
                self._tick()
            if not self._stop.is_set():
                self._start(process for process in self._processes.values() if not process.running)
            while not self._stop.is_set():
                self._tick()
        except BaseException as error:
            self._failure = f"the supervisor itself failed: {error!r}"
            raise
        finally:
            try:
                self._stop_all()
            finally:
                with self._changed:
                    self._finished = True
                    self._changed.notify_all()

    def _start(self, processes: Iterable[ManagedProcess]) -> None:
        for process in processes:
            process.start()
        self._publish()

    def _tick(self) -> None:
        """Check every process once: restart those that have ended, read heartbeats, request the health, and pause."""
        for name, process in self._processes.items():
            status = process.reap()
            if status == _SETTINGS_STATUS and not process.has_answered:
                self._fail_start(name, process)
            elif status == _SETTINGS_STATUS:  # somebody changed the settings file while the services ran
                self._restart_later(name, process, f"refuses its settings: {_last_message(name, process.log.tail)}")
            elif status is not None:
                self._restart_later(name, process, f"ended ({_cause(status)})")
            if (message := process.check_liveness()) is not None:
                self._report(f"{name} {message}")
            if process.is_restart_time():
                try:
                    process.start()
                except OSError as error:
                    self._restart_later(name, process, f"cannot be started: {error}")
            process.check_health()
        if self._write_failed or any(
            process.state != self._state.services[name] for name, process in self._processes.items()
        ):
            self._publish()
        if time.monotonic() > self._next_touch_s:
            self._next_touch_s = time.monotonic() + _TOUCH_S
            touch(self.data_dir)
        self._stop.wait(_TICK_S)

    def _restart_later(self, name: str, process: ManagedProcess, reason: str) -> None:
        pause_s = process.plan_restart()
        self._report(f"{name} {reason}; starting it again in {pause_s:g} s")

    def _fail_start(self, name: str, process: ManagedProcess) -> None:
        self._failure = f"{name} refuses its settings: {_last_message(name, process.log.tail)}"
        self._stop.set()

    def _stop_all(self) -> None:
        last = [process for process in self._processes.values() if process.plan.info.is_bus]
        first = [process for process in self._processes.values() if process not in last]
        for group in (first, last):
            self._stop_group(group)
        self._publish()
        self._state_file.unlink(missing_ok=True)

    def _stop_group(self, group: list[ManagedProcess]) -> None:
        for process in group:
            process.terminate()
        deadline = time.monotonic() + self._limits.stop_timeout_s
        while remaining := [process for process in group if not process.stopped()]:
            if time.monotonic() > deadline or self._kill_now.is_set():
                for process in remaining:
                    process.kill()
            time.sleep(_TICK_S / 2)

    def _publish(self) -> None:
        with self._changed:
            self._state = self._snapshot()
            self._write_state()
            self._changed.notify_all()

    def _write_state(self) -> None:
        """Write the state file. If the disk is full, report that once, and try again in the next round."""
        try:
            self._state.write(self.data_dir)
        except OSError as error:
            if not self._write_failed:
                self._report(
                    f"cannot write the state file: disk: {(error.strerror or str(error)).lower()} on {self.data_dir}"
                )
            self._write_failed = True
        else:
            self._write_failed = False

    def _snapshot(self) -> RunState:
        return RunState(
            pid=os.getpid(),
            data_dir=str(self.data_dir),
            started_at=self._started_at,
            bus=self.plan.bus,
            services={name: process.state for name, process in self._processes.items()},
            left_out=dict(self.plan.left_out),
            token_is_key=self.plan.token_is_key,
            token_is_password=self.plan.token_is_password,
        )

    def _process(self, service: planning.ServicePlan) -> ManagedProcess:
        path = self.data_dir / "logs" / f"{service.name}.log"
        log = LogFile(path, self._limits.log_bytes_max, self._limits.log_backups)
        return ManagedProcess(service, self.plan.environ, log, self._limits)

    def _wait_for(self, reached: Callable[[RunState], bool], timeout_s: float, failure: str) -> RunState:
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while not reached(self._state) and not self._finished and self._changed.wait(deadline - time.monotonic()):
                pass
        state = self._state
        if reached(state):
            return state
        late = [name for name in state.services if not reached(_select_service(state, name))]
        waiting = [name for name in late if state.services[name].pid is None and not self._processes[name].log.tail]
        problems = [f"{name} {failure} {self._describe_output(name)}" for name in late if name not in waiting]
        if waiting and problems:
            problems.append(f"{', '.join(waiting)} did not start before that")
        self.stop()
        raise StartFailed(self._failure or f"after {timeout_s:g} s {'; '.join(problems) or 'no service was started'}")

    def _describe_output(self, name: str) -> str:
        lacks = self._state.services[name].lacks
        tail = self._processes[name].log.tail
        if lacks:
            return f"(it lacks {', '.join(lacks)})"
        return f"({_log_line_message(tail[-1]) if tail else 'no output'})"


def _select_service(state: RunState, name: str) -> RunState:
    return state.model_copy(update={"services": {name: state.services[name]}})


def _last_message(name: str, tail: Iterable[str]) -> str:
    """Return the last message for users in the output of a service, without the other lines of its log."""
    lines = [line for line in tail if line.strip()]
    marked = [line for line in lines if line.startswith(f"headrace {name}: ")]
    return (marked or lines or ["no output"])[-1].removeprefix(f"headrace {name}: ")


def _log_line_message(line: str) -> str:
    """Return the message of a log line, which may be JSON."""
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        return line
    message = fields.get("error") or fields.get("event") if isinstance(fields, dict) else None
    return str(message or line)


def _cause(status: int) -> str:
    return f"signal {-status}" if status < 0 else f"exit status {status}"
