"""A process that somebody starts again whenever it dies, as a supervisor does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.support.headrace_up import as_setting


class KeptProcess:
    """`start`, `kill` (SIGKILL), and `keep` again and again: it starts who is dead."""

    def __init__(self, name: str, module: str, folder: Path, port: int, arguments: tuple[str, ...] = ()) -> None:
        self.name = name
        self.port = port
        self.deaths = 0
        self._command = [sys.executable, "-m", module, *arguments]
        self._log = folder / f"{name}.log"
        self._environ: Mapping[str, str] = {}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, settings: Mapping[str, object], environ: Mapping[str, str] | None = None) -> None:
        """With these settings now and whenever it starts again."""
        named = {f"HEADRACE_{name}": as_setting(value) for name, value in settings.items()}
        self._environ = {**os.environ, **(environ or {}), **named}
        self._begin()

    def _begin(self) -> None:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log, env=dict(self._environ))

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def last_words(self) -> str:
        return self._log.read_text(encoding="utf-8")[-2000:] if self._log.exists() else ""

    def kill(self) -> None:
        process = self._process  # somebody else may start another one meanwhile
        assert process is not None
        process.send_signal(signal.SIGKILL)
        process.wait()

    def keep(self) -> None:
        if self._process is not None and not self.alive:
            self.deaths += 1
            self._begin()

    def stop(self) -> None:
        if self._process is None or not self.alive:
            return
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self.kill()
