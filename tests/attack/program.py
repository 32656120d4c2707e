"""Attacks of outsiders on running stacks, with measured figures.

An attack is a module of `tests.attack.attacks` with a `TITLE` and `async def attack(folder, rng) -> list[Line]`. It
starts its own servers in `folder`, on free ports, and stops them.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import logging
import pkgutil
import random
import tempfile
import time
import traceback
from pathlib import Path

import structlog

from tests.attack import attacks
from tests.system.program import Line, Program, Run

NAMES = sorted(module.name for module in pkgutil.iter_modules(attacks.__path__))
TIMEOUT_S = 900.0


def play(run: Run) -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    results: dict[str, object] = {}
    with run.progress(len(run.options.only), "attacks") as progress:
        for number, name in enumerate(run.options.only):
            progress.update(number, activity=name)
            began_s = time.monotonic()
            title, lines = play_attack(name, run.seed)
            seconds = round(time.monotonic() - began_s, 1)
            print(f"{name}: {title} ({seconds} s)", flush=True)
            run.add(*lines)
            results[name] = {"title": title, "took_s": seconds, "lines": [line.as_json() for line in lines]}
    run.figures["attacks"] = results


def play_attack(name: str, seed: int) -> tuple[str, list[Line]]:
    """Return the title and the result lines of one attack. An exception becomes a line that does not hold."""
    module = importlib.import_module(f"{attacks.__name__}.{name}")
    with tempfile.TemporaryDirectory(prefix=f"attack-{name}-", ignore_cleanup_errors=True) as folder:
        try:
            attack = module.attack(Path(folder), random.Random(f"{seed} {name}"))
            lines = asyncio.run(asyncio.wait_for(attack, getattr(module, "TIMEOUT_S", TIMEOUT_S)))
        except Exception as error:  # noqa: BLE001 - an attack that cannot be played must not hide the others
            traceback.print_exc()
            return module.TITLE, [Line("played to its end", f"{type(error).__name__}: {error}", "yes", holds=False)]
    return module.TITLE, lines or [Line("reports lines", "no line", "at least one", holds=False)]


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, help="attacks to play (default: all)")


PROGRAM = Program("Play attacks on running stacks.", play, _add_arguments)
