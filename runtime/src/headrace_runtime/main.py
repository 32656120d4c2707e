"""How every service starts: parse, read settings, then import the rest, run until told to stop.

Exit status: 0 after a stop, 1 after a crash (a supervisor restarts), 2 when the settings are wrong (it does not).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Generic, NoReturn, TypeVar

from headrace_runtime.errors import HeadraceError, SettingError
from headrace_runtime.settings import CONFIG_VARIABLE, Common, ServiceSettings, load

S = TypeVar("S", bound=ServiceSettings)
Run = Callable[[Common, S], Awaitable[None]]


@dataclass(frozen=True)
class Service(Generic[S]):
    """A service's name and where its composition root is: `run` is `module:function`, imported after the settings."""

    name: str
    summary: str
    settings: type[S]
    run: str

    def main(self) -> NoReturn:
        """The whole life of the process. Never returns."""
        sys.exit(self._main())

    def _main(self) -> int:
        parser = argparse.ArgumentParser(prog=f"headrace_{self.name}", description=self.summary)
        parser.add_argument("--config", type=Path, default=os.environ.get(CONFIG_VARIABLE), help="a TOML file")
        parser.add_argument("--check-config", action="store_true", help="read the settings, start nothing")
        parser.add_argument("--describe-settings", action="store_true", help="print every setting as JSON and stop")
        arguments = parser.parse_args()
        if arguments.describe_settings:
            return self._describe()
        try:
            common, own = load(self.name, self.settings, arguments.config)
        except SettingError as error:
            print(f"headrace {self.name}: {error}", file=sys.stderr)  # noqa: T201 (logs are not configured yet)
            return 2
        if arguments.check_config:
            return 0
        from headrace_runtime import logs

        logs.configure(self.name, common.logs)
        log = logs.get_logger(f"headrace_{self.name}")
        module, function = self.run.split(":")
        try:
            asyncio.run(_until_stopped(getattr(import_module(module), function), common, own))
        except SettingError as error:
            log.error("refused_to_start", error=str(error))
            return 2
        except (asyncio.CancelledError, KeyboardInterrupt):
            log.info("stopped")
            return 0
        except HeadraceError as error:
            log.error("crashed", error=str(error), kind=type(error).__name__)
            return 1
        except BaseExceptionGroup as group:
            log.error("crashed", error=repr(group.exceptions), exc_info=group)
            return 1
        return 0

    def _describe(self) -> int:
        from headrace_runtime.reference import describe

        described = {"common": describe(Common), self.name: describe(self.settings, f"{self.name}.")}
        text = json.dumps({name: [doc.model_dump() for doc in docs] for name, docs in described.items()})
        sys.stdout.write(text + "\n")
        return 0


async def _until_stopped(run: Run[S], common: Common, own: S) -> None:
    """Run; SIGTERM and SIGINT cancel, and whatever `run` does in its `finally` blocks is the clean stop."""
    from headrace_runtime.loop_watch import watched

    task = asyncio.ensure_future(watched(run(common, own)))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, task.cancel)
    await task
