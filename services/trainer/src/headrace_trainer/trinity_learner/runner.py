"""The process of Trinity: it is started for one job, and ends with the trainer, even if that is killed."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

from headrace_runtime.errors import SettingError
from headrace_runtime.process.parent_death import bound_to_parent
from headrace_runtime.process.programs import program_environment

_END_S = 20.0
_LOG_TAIL_BYTES = 2000


class TrinityProcess:
    """A process of Trinity. Its exit status is ignored, because Trinity's loop treats every exception as an end."""

    def __init__(
        self, command: Sequence[str], configuration: Path, log: Path, environment_names: Iterable[str] = ()
    ) -> None:
        """Start the process. Raises `SettingError`."""
        self._log = log
        with log.open("ab") as file:
            try:
                self._process = subprocess.Popen(
                    bound_to_parent([*command, str(configuration)]),
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    env=program_environment(environment_names),
                )
            except OSError as error:
                raise SettingError("trainer.trinity.command", list(command), f"does not start: {error}") from None

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def output_tail(self) -> str:
        """Return the end of its output."""
        with self._log.open("rb") as file:
            file.seek(max(0, self._log.stat().st_size - _LOG_TAIL_BYTES))
            return file.read().decode(errors="replace").strip()

    def close(self) -> None:
        """End the process. Calling it again has no effect."""
        if self.ended:
            return
        self._process.terminate()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
