"""A process that is restarted after each death, as by a supervisor."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tests.support.service_process import LoggedProcess


class KeptProcess(LoggedProcess):
    """`start`, `kill` (SIGKILL), and repeated calls of `keep`, which restarts a dead process."""

    def __init__(self, name: str, module: str, folder: Path, port: int, arguments: tuple[str, ...] = ()) -> None:
        super().__init__(name, module, folder / f"{name}.log", port, arguments)

    def start(self, settings: Mapping[str, object], environ: Mapping[str, str] | None = None) -> None:
        """With these settings now and whenever it starts again."""
        self.set(settings, environ)
        self.begin()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def last_words(self) -> str:
        return self.log[-2000:] if self._log.exists() else ""

    def keep(self) -> None:
        if self._process is not None and not self.running():
            self.begin()

    def end(self) -> None:
        """Whether it was ever started or not."""
        if self._process is not None:
            self.stop()
