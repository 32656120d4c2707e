"""The embedded broker in a separate process, as users run it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.processes import free_port, wait_open


class BrokerProcess:
    """Broker process that can be killed (SIGKILL) and started again on the same folder and port."""

    def __init__(self, folder: Path, **settings: object) -> None:
        self.port = free_port()
        self._folder = folder
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        settings = {"DATA_DIR": self._folder, "BROKER__KAFKA_PORT": self.port, "BROKER__PORT": 0, **self._settings}
        environ = {f"HEADRACE_{name}": str(value) for name, value in settings.items()}
        log = (self._folder / "broker.log").open("ab")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "headrace_broker"], stdout=log, stderr=log, env={**os.environ, **environ}
        )
        wait_open(self.port, 60)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                self.kill()
