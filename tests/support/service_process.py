"""A service as its own process, as a user has it: settings by environment, one log; killed and started at will."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import httpx

from headrace_operations.supervisor.process import yield_processor
from headrace_runtime.services import installed
from tests.support.headrace_up import as_setting
from tests.support.ports import free_port
from tests.support.processes import wait_until


class LoggedProcess:
    """A Python module as a process, with a port and one log for all its lives."""

    def __init__(self, name: str, module: str, log: Path, port: int, arguments: tuple[str, ...] = ()) -> None:
        self.name = name
        self.port = port
        self._command = [sys.executable, "-m", module, *arguments]
        self._log = log
        self._environ: dict[str, str] = {}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None, "it is started first"
        return self._process.pid

    @property
    def log(self) -> str:
        return self._log.read_text(encoding="utf-8")

    def set(self, settings: Mapping[str, object], environ: Mapping[str, str] | None = None) -> None:
        """Its environment at each start. `environ`: variables in addition to its settings, for example
        `wrong_clock.environ`."""
        named = {f"HEADRACE_{key}": as_setting(value) for key, value in settings.items()}
        self._environ = {**os.environ, **(environ or {}), **named}

    def begin(self) -> None:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log, env=self._environ)

    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def wait(self, timeout_s: float) -> int:
        assert self._process is not None
        return self._process.wait(timeout_s)

    def kill(self) -> None:
        process = self._process  # somebody else may start another one meanwhile
        assert process is not None
        process.kill()
        process.wait()

    def stop(self) -> int:
        """SIGTERM; returns the exit status."""
        assert self._process is not None
        if self.running():
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                self.kill()
        return self._process.returncode


class ServiceProcess(LoggedProcess):
    """`python -m headrace_<name>`. Its data folder is `folder`, where a successor finds the state of the dead."""

    def __init__(
        self, name: str, folder: Path, bus: str, environ: Mapping[str, str] | None = None, /, **settings: object
    ) -> None:
        """`environ`: see `LoggedProcess.set`."""
        port = free_port()
        super().__init__(name, f"headrace_{name}", folder / f"{name}-{port}.log", port)
        self.set({"DATA_DIR": folder, "BUS__ADDRESS": bus, f"{name.upper()}__PORT": port, **settings}, environ)
        folder.mkdir(parents=True, exist_ok=True)

    def begin(self) -> None:
        """Start it with the priority that `headrace up` gives it."""
        super().begin()
        if installed()[self.name].is_background:
            yield_processor(self.pid)

    def start(self, *, ready: bool = True) -> None:
        self.begin()
        if ready:
            wait_until(self.healthy, 60, f"{self.name} is healthy; its log says {self._log}")

    def healthy(self) -> bool:
        """Raises when the process has ended instead."""
        assert self._process is not None
        if self._process.poll() is not None:
            raise AssertionError(f"{self.name} ended with status {self._process.returncode}: {self.log[-3000:]}")
        try:
            return httpx.get(f"{self.url}/health", timeout=2, trust_env=False).status_code == 200
        except httpx.HTTPError:
            return False
