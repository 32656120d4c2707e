"""Fixtures for a trainer as a process on a real bus."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import tiny_model
from tests.support.processes import free_port
from tests.support.service_process import LoggedProcess


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.build(tmp_path_factory.mktemp("trainer-process") / "base", layers=1)


class TrainerProcess(LoggedProcess):
    """Trainer process. Call `begin`, then `kill` (SIGKILL) or `stop` (SIGTERM), and `begin` again on the same
    folder."""

    def __init__(self, folder: Path, bus: str, base: Path, **settings: object) -> None:
        super().__init__("trainer", "headrace_trainer", folder / "trainer.log", free_port())
        self.data_dir = folder / "data"
        own_settings = {"BASE": base, "PORT": self.port, "STEPS_PER_VERSION": 1, **settings}
        named = {f"TRAINER__{name}": value for name, value in own_settings.items()}
        self.set({"DATA_DIR": self.data_dir, "BUS__ADDRESS": bus, **named})


@pytest.fixture
def processes() -> Iterator[list[TrainerProcess]]:
    """Yield a list for trainer processes, which are all killed after the test."""
    started: list[TrainerProcess] = []
    yield started
    for process in started:
        if process.running():
            process.kill()
