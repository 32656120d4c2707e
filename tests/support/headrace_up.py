"""`headrace up` in a separate process, which starts, watches and stops all services."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from headrace_operations.supervisor import NotRunning, RunState, read
from headrace_operations.toml_text import toml
from tests.support.processes import wait_until

HEADRACE = str(Path(sys.executable).with_name("headrace"))
_START_S = 180.0
_STOP_S = 60.0


def run_of(folder: Path) -> RunState | None:
    """Return the state of the stack on the data directory `folder`, or None if no stack runs."""
    try:
        return read(folder)
    except NotRunning:
        return None


class HeadraceUp:
    """Process of `headrace up` that can be stopped and started again on the same data directory, each time on free
    ports.
    """

    def __init__(
        self,
        folder: Path,
        config: Path,
        settings: Mapping[str, object],
        environ: Mapping[str, str],
        program: str = HEADRACE,
    ) -> None:
        self.folder = folder
        self._command = [program, "up", "--data-dir", str(folder), "--config", str(config), "--auto-ports"]
        self._command += [word for name, value in settings.items() for word in ("--set", f"{name}={as_setting(value)}")]
        self._environ = {**os.environ, **environ}
        self._log = folder.with_name(f"{folder.name}.log")
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def state(self) -> RunState:
        return read(self.folder)

    @property
    def base_url(self) -> str:
        return self.state.base_url or ""

    @property
    def log(self) -> str:
        """Return the output of the command."""
        return self._log.read_text(encoding="utf-8")

    def start(self) -> RunState:
        """Start the stack. Return once every service is ready and the gateway serves a version."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log, env=self._environ)
        wait_until(self._ready, _START_S, f"headrace up in {self.folder} is ready")
        return self.state

    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def stop(self) -> int:
        """Stop the stack as with Ctrl-C and return the exit status."""
        assert self._process is not None
        if self.running():
            self._process.send_signal(signal.SIGINT)
            try:
                self._process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()  # the services end with it
        return self._process.wait()

    def status(self) -> dict[str, object]:
        """Return `headrace status --json`. Raises an error if its counts do not add up."""
        command = [HEADRACE, "status", "--data-dir", str(self.folder), "--json"]
        process = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        assert process.returncode == 0, f"{process.stdout}{process.stderr}"
        status: dict[str, object] = json.loads(process.stdout)
        return status

    def _ready(self) -> bool:
        assert self.running(), self.log[-3000:]
        state = run_of(self.folder)
        return state is not None and state.ready


def as_setting(value: object) -> str:
    """Return a value in the form for `--set` and the environment: a string unchanged, other values as TOML."""
    return value if isinstance(value, str) else toml(value)
