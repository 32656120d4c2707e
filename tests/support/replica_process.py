"""An inference replica as its own process, as a user has it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx

from tests.support.ports import free_port, wait_open


class ReplicaProcess:
    """`start`, `kill` (SIGKILL), `stop` (SIGTERM) and `start` again on the same port and folder."""

    def __init__(self, data_dir: Path, bus: str, **settings: object) -> None:
        self.port = free_port()
        self.replica_id = f"127.0.0.1:{self.port}"
        self.url = f"http://127.0.0.1:{self.port}"
        self._data_dir = data_dir
        self._settings = {
            "DATA_DIR": data_dir,
            "BUS__ADDRESS": bus,
            "INFERENCE__PORT": self.port,
            "INFERENCE__HEARTBEAT_S": 0.3,
            "INFERENCE__TTL_S": 3,
            "INFERENCE__DRAIN_S": 0.2,
            "INFERENCE__TORCH__DEVICE": "cpu",
            **settings,
        }
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def log(self) -> str:
        path = self._data_dir / "inference.log"
        return path.read_text() if path.exists() else ""

    def start(self, timeout_s: float = 300.0) -> None:
        """Returns once it listens. torch takes most of the time."""
        self._data_dir.mkdir(parents=True, exist_ok=True)
        environ = {f"HEADRACE_{name}": str(value) for name, value in self._settings.items()}
        with (self._data_dir / "inference.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "headrace_inference"], stdout=log, stderr=log, env={**os.environ, **environ}
            )
        wait_open(self.port, timeout_s)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def terminate(self) -> None:
        """Request a clean stop and return at once."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)

    def wait(self, timeout_s: float = 30.0) -> int:
        """The exit status."""
        assert self._process is not None
        return self._process.wait(timeout_s)

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self.terminate()
            try:
                self.wait(20)
            except subprocess.TimeoutExpired:
                self.kill()

    def metric(self, name: str) -> float:
        """The sum of a metric's samples."""
        lines = httpx.get(f"{self.url}/metrics", trust_env=False).text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0].split(" ")[0] == name)
