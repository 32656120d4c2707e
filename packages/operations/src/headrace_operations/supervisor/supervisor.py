"""One supervisor for all services of a data directory."""

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

from headrace_operations.errors import StartFailed
from headrace_operations.supervisor import plan as planning
from headrace_operations.supervisor.log_file import LogFile
from headrace_operations.supervisor.overrides import Overrides
from headrace_operations.supervisor.process import Limits, ManagedProcess
from headrace_operations.supervisor.state import Lock, RunState, touch
from headrace_runtime.services import ServiceInfo
from headrace_schemas.stack_access import BusLogin, make_token, remember_key, remember_login

_TICK_S = 0.05
_TOUCH_S = 1.0
_WRONG_SETTINGS = 2
"""Exit status of a service that refuses its settings: starting it again cannot help."""


class Supervisor:
    """`start`, `wait_ready`, and `stop` (or `with`, which does all three). Methods may be called from any thread.

    `settings` are `{"gateway.port": 8100, ...}` and win over the environment and the `config` file. `only` and
    `without` name services; the broker is left out when `bus.address` is set, the judge without
    `judge.endpoint.base_url`, the trainer without `trainer.base`. `auto_ports` gives free ports to services whose port
    is not set. `pythons` are the interpreters of services that live in environments of their own. `report` hears, in
    one line each, what happens to services. Raises `UsageError` when this cannot be started at all.
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
        found = planning.installed() if services is None else services
        folder = planning.data_dir_of(data_dir, overrides)
        self._lock = Lock(folder)
        self._lock.take()
        try:
            token = make_token(folder)
            self.plan = planning.make(
                data_dir,
                overrides,
                found,
                only=only,
                without=without,
                auto_ports=auto_ports,
                pythons=pythons,
                token=token,
            )
            self.internal_key = str(overrides.get("security.internal_key"))
            """What services ask for. Keep it out of logs and arguments."""
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
        self._impatient = threading.Event()
        self._changed = threading.Condition()
        self._state = self._snapshot()
        for service in self._state.services.values():
            remember_key(service.url, self.internal_key)
        login = overrides.bus_settings(self.plan.bus)
        remember_login(self.plan.bus, BusLogin(login.username, login.password.get_secret_value(), login.mechanism))
        self._state_file.unlink(missing_ok=True)  # of a supervisor that was killed
        self._failure: str | None = None
        self._over = False
        self._unwritten = False
        self._touch_s = 0.0

    # what the owner calls

    def start(self) -> None:
        """Begin; returns at once."""
        self._thread.start()

    def wait_up(self, timeout_s: float = 120.0) -> RunState:
        """Returns when every service answers. Raises `StartFailed`, and then everything is stopped."""
        return self._wait_for(lambda state: state.up, timeout_s, "does not answer")

    def wait_ready(self, timeout_s: float = 120.0) -> RunState:
        """Returns when every service can do its work; the gateway cannot before a model is served. Raises likewise."""
        return self._wait_for(lambda state: state.ready, timeout_s, "is not ready")

    def wait(self, timeout_s: float | None = None) -> bool:
        """Whether everything has stopped, within `timeout_s`. Raises `StartFailed` when a service made it stop."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return False
        if self._failure is not None:
            raise StartFailed(self._failure)
        return True

    def stop(self) -> None:
        """Stop every service, the broker last, and return when none is left. Calling it again does nothing."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._lock.release()

    def begin_stop(self, *, now: bool = False) -> None:
        """What a signal handler may call: `stop` without waiting for it. `now` kills who has not stopped yet."""
        if now:
            self._impatient.set()
        self._stop.set()

    @property
    def state(self) -> RunState:
        """What runs now."""
        return self._state

    @property
    def pids(self) -> dict[str, int]:
        """Process id of each service that runs."""
        return {name: state.pid for name, state in self._state.services.items() if state.pid is not None}

    @property
    def base_url(self) -> str:
        """What goes into `OpenAI(base_url=...)`."""
        return self._state.base_url or ""

    def url(self, service: str) -> str:
        """Root of a service's HTTP."""
        return self._state.services[service].url

    def __enter__(self) -> Self:
        self.start()
        self.wait_ready()
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.stop()

    # what the supervisor's thread does

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
                    self._over = True
                    self._changed.notify_all()

    def _start(self, processes: Iterable[ManagedProcess]) -> None:
        for process in processes:
            process.start()
        self._publish()

    def _tick(self) -> None:
        """Look at every process once."""
        for name, process in self._processes.items():
            status = process.died()
            if status == _WRONG_SETTINGS:
                self._give_up(name, process)
            elif status is not None:
                pause_s = process.plan_restart()
                self._report(f"{name} ended ({_cause(status)}); starting it again in {pause_s:g} s")
            if (said := process.check_liveness()) is not None:
                self._report(f"{name} {said}")
            if process.restart_is_due():
                process.start()
            process.check_health()
        if self._unwritten or any(
            process.state != self._state.services[name] for name, process in self._processes.items()
        ):
            self._publish()
        if time.monotonic() > self._touch_s:
            self._touch_s = time.monotonic() + _TOUCH_S
            touch(self.data_dir)
        self._stop.wait(_TICK_S)

    def _give_up(self, name: str, process: ManagedProcess) -> None:
        self._failure = f"{name} refuses its settings: {_refusal(name, process.log.tail)}"
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
            if time.monotonic() > deadline or self._impatient.is_set():
                for process in remaining:
                    process.kill()
            time.sleep(_TICK_S / 2)

    def _publish(self) -> None:
        with self._changed:
            self._state = self._snapshot()
            self._write_state()
            self._changed.notify_all()

    def _write_state(self) -> None:
        """A full disk is no reason to stop anything: it is told once, and the next tick tries again."""
        try:
            self._state.write(self.data_dir)
        except OSError as error:
            if not self._unwritten:
                self._report(f"cannot say what runs: disk: {(error.strerror or str(error)).lower()} on {self.data_dir}")
            self._unwritten = True
        else:
            self._unwritten = False

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

    def _wait_for(self, reached: Callable[[RunState], bool], timeout_s: float, what: str) -> RunState:
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while not reached(self._state) and not self._over and self._changed.wait(deadline - time.monotonic()):
                pass
        state = self._state
        if reached(state):
            return state
        late = [name for name in state.services if not reached(_only(state, name))]
        waiting = [name for name in late if state.services[name].pid is None and not self._processes[name].log.tail]
        said = [f"{name} {what} {self._last_words(name)}" for name in late if name not in waiting]
        if waiting and said:
            said.append(f"{', '.join(waiting)} waited for that")
        self.stop()
        raise StartFailed(self._failure or f"after {timeout_s:g} s {'; '.join(said) or 'nothing was started'}")

    def _last_words(self, name: str) -> str:
        lacks = self._state.services[name].lacks
        tail = self._processes[name].log.tail
        return f"(it lacks {', '.join(lacks)})" if lacks else f"({_sentence(tail[-1]) if tail else 'it said nothing'})"


def _only(state: RunState, name: str) -> RunState:
    return state.model_copy(update={"services": {name: state.services[name]}})


def _refusal(name: str, tail: Iterable[str]) -> str:
    """The sentence that a service says last, for people; its log may have more."""
    said = [line for line in tail if line.strip()]
    marked = [line for line in said if line.startswith(f"headrace {name}: ")]
    return (marked or said or ["it said nothing"])[-1].removeprefix(f"headrace {name}: ")


def _sentence(line: str) -> str:
    """What a line of a log says to people; logs may be JSON."""
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        return line
    said = fields.get("error") or fields.get("event") if isinstance(fields, dict) else None
    return str(said or line)


def _cause(status: int) -> str:
    return f"signal {-status}" if status < 0 else f"exit status {status}"
