"""Program of every service: it parses arguments, loads settings, imports the service and runs it until it is stopped.

Exit status: 0 after a stop, 1 after a crash, 2 for invalid settings. A supervisor restarts a service only after 1.
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
from typing import Any, Generic, NoReturn, TypeVar
from urllib.parse import unquote, urlsplit

from pydantic import BaseModel, SecretStr

from headrace_runtime.errors import HeadraceError, SettingError
from headrace_runtime.process import liveness
from headrace_runtime.registries import PluginError
from headrace_runtime.settings.sections import Common, ServiceSettings, complete, load
from headrace_runtime.settings.table import CONFIG_VARIABLE
from headrace_runtime.storage.disk import private_folder
from headrace_schemas.values.errors import is_secret

S = TypeVar("S", bound=ServiceSettings)
_SWITCH_INTERVAL_S = 0.0001
"""Interval after which a thread that computes lets the event loop's thread run. With Python's default of 5 ms, one
large request would delay each step of all other requests."""
_OWNER_ALONE = 0o077
_SECRET_LENGTH_MIN = 8
"""Minimum length of a secret in an environment variable that is not a setting. Shorter values are probably ordinary
words, which must not be removed from logs."""
GARBAGE_THRESHOLD = 50_000
"""Number of new objects after which Python collects garbage. With Python's default, 700, and the modules of a service,
collections took a fifth of a busy event loop's time."""
STREAM_GARBAGE_THRESHOLD = 10_000
"""Number of new objects after which services that hold complete runs in memory collect garbage. One collection of
50,000 such objects, each with containers of its own, blocked their event loops for 25 to 142 ms."""
PYTHON_GARBAGE_THRESHOLD = 700
Run = Callable[[Common, S], Awaitable[None]]


@dataclass(frozen=True)
class Service(Generic[S]):
    """Description of one service, by which its module `__main__` starts it."""

    name: str
    summary: str
    settings: type[S]
    run: str
    """Function that composes and runs the service, as `module:function`. It is imported after the settings were
    loaded."""
    check: str = ""
    """Function that checks whether the service could start, as `module:function` (see `headrace_runtime.check`); empty
    for none."""
    garbage_threshold: int = GARBAGE_THRESHOLD
    """Net allocations between two garbage collections. Services whose reference cycles may hold tensors use Python's
    own threshold, because it does not count the bytes of tensors."""
    notes: str = ""
    """Function, as `module:function`, that returns sentences about the settings, for example sizes that follow from
    them. `--check` prints them if it has found no problem."""
    suggest: str = ""
    """Function, as `module:function`, that returns suggested values by the names of settings, computed from other
    settings. `--suggest-settings` prints them."""

    def main(self) -> NoReturn:
        """Run the process from parsing the arguments to its exit."""
        if sys.platform == "win32":
            sys.exit(f"headrace {self.name}: services run on Linux, on macOS and in WSL; on Windows, use the client")
        sys.exit(self._main())

    def _main(self) -> int:
        parser = argparse.ArgumentParser(prog=f"headrace_{self.name}", description=self.summary)
        parser.add_argument("--config", type=Path, default=os.environ.get(CONFIG_VARIABLE), help="settings file (TOML)")
        parser.add_argument("--check-config", action="store_true", help="validate the settings and exit")
        parser.add_argument("--check", action="store_true", help="check everything that a start needs, and exit")
        parser.add_argument("--check-bus", action="store_true", help="like --check, including the bus")
        parser.add_argument("--describe-settings", action="store_true", help="print all settings as JSON and exit")
        parser.add_argument("--suggest-settings", action="store_true", help="print values that fit the others, as JSON")
        arguments = parser.parse_args()
        pipe = liveness.take_inherited_pipe(os.environ)
        if arguments.describe_settings:
            return self._describe()
        try:
            common, settings = load(self.name, self.settings, arguments.config)
        except (SettingError, PluginError) as error:
            print(f"headrace {self.name}: {error}", file=sys.stderr)  # noqa: T201 (logs are not configured yet)
            return 2
        status = self._run_option(arguments, common, settings)
        if status is not None:
            return status
        os.umask(_OWNER_ALONE)
        with contextlib.suppress(OSError):  # another user's folder or a full disk, which later writes report
            private_folder(common.data_dir)
        from headrace_runtime.process import logs

        logs.configure(self.name, common.logs, {*secrets_of(common, settings), *_environment_secrets(os.environ)})
        log = logs.get_logger(f"headrace_{self.name}")
        for note in common.notes:
            log.warning("setting_without_effect", detail=note)
        module, function = self.run.split(":")
        try:
            run = getattr(import_module(module), function)
            tune_garbage_collection(self.garbage_threshold)
            sys.setswitchinterval(_SWITCH_INTERVAL_S)
            asyncio.run(_run_until_stopped(run, common, settings, pipe))
        except (SettingError, PluginError) as error:
            log.error("refused_to_start", error=str(error))
            print(f"headrace {self.name}: {error}", file=sys.stderr)  # noqa: T201 (a sentence for the person who started it)
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

    def _run_option(self, arguments: argparse.Namespace, common: Common, settings: S) -> int | None:
        """Run the action of `--check` or `--suggest-settings`, and return the exit status; None if neither option was
        passed."""
        if arguments.check_config:
            return 0
        if arguments.suggest_settings:
            return self._suggest(common, settings)
        if arguments.check or arguments.check_bus:
            return self._check(common, settings, bus=arguments.check_bus)
        return None

    def _check(self, common: Common, settings: S, *, bus: bool) -> int:
        """Print one sentence per problem, or per note if there is no problem, and return the exit status: 2 or 0."""
        from headrace_runtime import check

        with contextlib.redirect_stdout(sys.stderr):  # log lines are no problems
            problems = asyncio.run(check.find_problems(self.name, common, settings, _function_of(self.check), bus=bus))
        notes = _function_of(self.notes) if not problems else None
        sentences = problems or [*common.notes, *(notes(common, settings) if notes else ())]
        sys.stdout.write("".join(f"{sentence}\n" for sentence in sentences))
        return 2 if problems else 0

    def _suggest(self, common: Common, settings: S) -> int:
        suggest = _function_of(self.suggest)
        with contextlib.redirect_stdout(sys.stderr):  # log lines are no settings
            values = suggest(common, settings) if suggest else {}
        sys.stdout.write(json.dumps(values) + "\n")
        return 0

    def _describe(self) -> int:
        from headrace_runtime.settings.reference import describe

        described = {"common": describe(Common), self.name: describe(complete(self.settings), f"{self.name}.")}
        text = json.dumps({name: [doc.model_dump() for doc in docs] for name, docs in described.items()})
        sys.stdout.write(text + "\n")
        return 0


def _function_of(name: str) -> Any:
    """Import the function named as `module:function`. Return None for an empty name."""
    module, _, function = name.partition(":")
    return getattr(import_module(module), function) if module else None


def tune_garbage_collection(threshold: int) -> None:
    """Exclude the present objects, which live as long as the process, from garbage collection, and set the threshold
    for new ones."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(threshold, *gc.get_threshold()[1:])


def _environment_secrets(environ: Mapping[str, str]) -> set[str]:
    """Return the values of all environment variables whose names denote secrets, and the passwords in URLs."""
    secrets = {value for name, value in environ.items() if len(value) >= _SECRET_LENGTH_MIN and is_secret(name)}
    return secrets.union(*(secrets_of_url(value) for value in environ.values() if "://" in value))


async def _run_until_stopped(run: Run[S], common: Common, settings: S, pipe: int | None) -> None:
    """Run the service until it ends, or until SIGTERM or SIGINT cancels it. `run` must stop cleanly in its `finally`
    blocks.

    The event loop sends heartbeats to the file descriptor `pipe` during the whole run (`liveness`).
    """
    from headrace_runtime.process.event_loop import watch_loop

    task = asyncio.ensure_future(watch_loop(run(common, settings)))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, task.cancel)
    async with liveness.send_heartbeats(pipe):
        await task


def secrets_of(*sections: BaseModel) -> set[str]:
    """Return the values of all `SecretStr` fields at any depth. Of a URL only its password is returned."""
    secrets: set[str] = set()
    for section in sections:
        for value in (getattr(section, name) for name in type(section).model_fields):
            if isinstance(value, BaseModel):
                secrets |= secrets_of(value)
            elif isinstance(value, tuple):
                secrets |= secrets_of(*(item for item in value if isinstance(item, BaseModel)))
            elif isinstance(value, SecretStr):
                text = value.get_secret_value()
                secrets |= secrets_of_url(text) if "://" in text else {text}
    return secrets - {"", "sqlite"}


def secrets_of_url(url: str) -> set[str]:
    """Return the password in a URL, as it is written and percent-decoded; an empty set without one."""
    try:
        password = urlsplit(url).password
    except ValueError:
        return set()
    return {password, unquote(password)} if password else set()
