"""Starts every service: parses arguments, reads settings, imports the rest, and runs until it is stopped.

Exit status: 0 after a stop, 1 after a crash (a supervisor restarts), 2 when the settings are wrong (it does not).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Generic, NoReturn, TypeVar

from headrace_runtime import liveness
from headrace_runtime.errors import HeadraceError, SettingError
from headrace_runtime.private_files import private_folder
from headrace_runtime.registries import PluginError
from headrace_runtime.settings import (
    Common,
    ServiceSettings,
    complete,
    load,
    secrets_of,
    secrets_of_url,
)
from headrace_runtime.settings_table import CONFIG_VARIABLE
from headrace_schemas.redaction import is_secret

S = TypeVar("S", bound=ServiceSettings)
_OWNER_ALONE = 0o077
_SECRET_LENGTH_MIN = 8
"""Of variables that are not settings of ours: shorter ones are more likely words."""
GARBAGE_THRESHOLD = 50_000
"""Python's own is 700: with what a service has imported, a fifth of a busy event loop's time went into collections."""
PYTHON_GARBAGE_THRESHOLD = 700
Run = Callable[[Common, S], Awaitable[None]]


@dataclass(frozen=True)
class Service(Generic[S]):
    """A service's name and where its composition root is: `run` is `module:function`, imported after the settings."""

    name: str
    summary: str
    settings: type[S]
    run: str
    check: str = ""
    """Where the service tries what a start would find wrong, `module:function`; see `headrace_runtime.check`."""
    garbage_threshold: int = GARBAGE_THRESHOLD
    """Net allocations between two garbage collections. Python's own where a cycle may keep tensors, whose bytes the
    count does not see."""

    def main(self) -> NoReturn:
        """The whole life of the process. Never returns."""
        sys.exit(self._main())

    def _main(self) -> int:
        parser = argparse.ArgumentParser(prog=f"headrace_{self.name}", description=self.summary)
        parser.add_argument("--config", type=Path, default=os.environ.get(CONFIG_VARIABLE), help="a TOML file")
        parser.add_argument("--check-config", action="store_true", help="read the settings, start nothing")
        parser.add_argument("--check", action="store_true", help="try all that a start would, and start nothing")
        parser.add_argument("--check-bus", action="store_true", help="the same, with a look at the bus")
        parser.add_argument("--describe-settings", action="store_true", help="print every setting as JSON and stop")
        arguments = parser.parse_args()
        pipe = liveness.handed_over(os.environ)
        if arguments.describe_settings:
            return self._describe()
        try:
            common, own = load(self.name, self.settings, arguments.config)
        except (SettingError, PluginError) as error:
            print(f"headrace {self.name}: {error}", file=sys.stderr)  # noqa: T201 (logs are not configured yet)
            return 2
        if arguments.check_config:
            return 0
        if arguments.check or arguments.check_bus:
            return self._check(common, own, bus=arguments.check_bus)
        os.umask(_OWNER_ALONE)
        with contextlib.suppress(OSError):  # somebody else's folder, or a full disk: what needs it will say so
            private_folder(common.data_dir)
        from headrace_runtime import logs

        logs.configure(self.name, common.logs, {*secrets_of(common, own), *_environment_secrets(os.environ)})
        log = logs.get_logger(f"headrace_{self.name}")
        module, function = self.run.split(":")
        try:
            run = getattr(import_module(module), function)
            tune_garbage_collection(self.garbage_threshold)
            asyncio.run(_until_stopped(run, common, own, pipe))
        except (SettingError, PluginError) as error:
            log.error("refused_to_start", error=str(error))
            print(f"headrace {self.name}: {error}", file=sys.stderr)  # noqa: T201 (for who started it, as a sentence)
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
        except Exception as error:
            log.error("crashed", error=repr(error), exc_info=error)
            return 1
        return 0

    def _check(self, common: Common, own: S, *, bus: bool) -> int:
        """A sentence on standard output for each thing that is wrong; exit status 2 when there is one."""
        from headrace_runtime import check

        module, _, function = self.check.partition(":")
        try_own = getattr(import_module(module), function) if module else None
        found = asyncio.run(check.problems(self.name, common, own, try_own, bus=bus))
        sys.stdout.write("".join(f"{sentence}\n" for sentence in found))
        return 2 if found else 0

    def _describe(self) -> int:
        from headrace_runtime.reference import describe

        described = {"common": describe(Common), self.name: describe(complete(self.settings), f"{self.name}.")}
        text = json.dumps({name: [doc.model_dump() for doc in docs] for name, docs in described.items()})
        sys.stdout.write(text + "\n")
        return 0


def tune_garbage_collection(threshold: int) -> None:
    """Exempt the objects that exist now, which live as long as the process, and collect seldom from here on."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(threshold, *gc.get_threshold()[1:])


def _environment_secrets(environ: Mapping[str, str]) -> set[str]:
    """What the environment holds under names of secrets, for us or for others, and the passwords of its URLs."""
    named = {value for name, value in environ.items() if len(value) >= _SECRET_LENGTH_MIN and is_secret(name)}
    return named.union(*(secrets_of_url(value) for value in environ.values() if "://" in value))


async def _until_stopped(run: Run[S], common: Common, own: S, pipe: int | None) -> None:
    """Run; SIGTERM and SIGINT cancel, and whatever `run` does in its `finally` blocks is the clean stop.

    `pipe` hears that the loop turns, from before the first step to after the last (`liveness`).
    """
    from headrace_runtime.loop_watch import watched

    task = asyncio.ensure_future(watched(run(common, own)))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, task.cancel)
    async with liveness.beating(pipe):
        await task
