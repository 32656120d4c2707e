"""Fixtures for a trainer as a process on a real bus."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import tiny_model
from tests.support.processes import free_port


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.build(tmp_path_factory.mktemp("trainer-process") / "base", layers=1)


class TrainerProcess:
    """Trainer process. Call `start`, then `kill` (SIGKILL) or `stop` (SIGTERM), and `start` again on the same
    folder."""

    def __init__(self, folder: Path, bus: str, base: Path, **settings: object) -> None:
        self.data_dir = folder / "data"
        self.port = free_port()
        self.log = folder / "trainer.log"
        own_settings = {"BASE": base, "PORT": self.port, "STEPS_PER_VERSION": 1, **settings}
        self._environ = {
            **os.environ,
            "HEADRACE_DATA_DIR": str(self.data_dir),
            "HEADRACE_BUS__ADDRESS": bus,
            **{f"HEADRACE_TRAINER__{name}": str(value) for name, value in own_settings.items()},
        }
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as log:
            command = [sys.executable, "-m", "headrace_trainer"]
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=self._environ)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def stop(self) -> int:
        """Send SIGTERM, and return the exit status."""
        assert self._process is not None
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        return self._process.wait(30)

    @property
    def status(self) -> int | None:
        return None if self._process is None else self._process.poll()

    def end(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self.kill()


@pytest.fixture
def processes() -> Iterator[list[TrainerProcess]]:
    """Yield a list for trainer processes, which are all killed after the test."""
    started: list[TrainerProcess] = []
    yield started
    for process in started:
        process.end()
