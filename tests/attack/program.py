"""Attacks of outsiders on running stacks, with measured figures.

An attack is a coroutine function `(folder, rng) -> list[Line]` in a module of `tests.attack.attacks`, with its title as
decorator and its name in `MODULES`. It starts its own servers in `folder`, on free ports, and stops them.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import logging
import random
import tempfile
import time
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import structlog

from tests.system.program import Line, Program, Run

MODULES = {
    "any_input": ["any_input"],
    "damaged_data": ["bad_records", "flipped_bytes_broker", "spool_flips"],
    "forged_events": ["forged_replicas", "trajectory_door"],
    "full_disk": ["full_disk"],
    "greedy_tenants": ["amplification", "greedy_tenant"],
    "hostile_requests": ["blocked_loops", "hostile_http", "web_pages"],
    "hung_processes": ["hung_replica", "hung_services"],
    "identities": ["digests", "exact_names"],
    "leaks": ["cross_tenant_cache", "other_users", "secrets"],
    "lineage_owners": ["lineage_owners"],
    "neighbours": ["neighbours"],
    "wrong_time_and_releases": ["bad_deploy", "last_word", "rollback_stays"],
}
"""Names of the attacks by their module of `tests.attack.attacks`."""
NAMES = sorted(name for names in MODULES.values() for name in names)


@dataclass(frozen=True)
class Attack:
    """An attack: `title` is its heading in the report, `play` returns its result lines."""

    title: str
    play: Callable[[Path, random.Random], Awaitable[list[Line]]]
    timeout_s: float


def attack(
    title: str, timeout_s: float = 900.0
) -> Callable[[Callable[[Path, random.Random], Awaitable[list[Line]]]], Attack]:
    """Return a decorator that makes an attack of a coroutine function."""
    return lambda play: Attack(title, play, timeout_s)


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
    module = next(module for module, names in MODULES.items() if name in names)
    chosen: Attack = getattr(importlib.import_module(f"tests.attack.attacks.{module}"), name)
    with tempfile.TemporaryDirectory(prefix=f"attack-{name}-", ignore_cleanup_errors=True) as folder:
        try:
            lines = asyncio.run(
                asyncio.wait_for(chosen.play(Path(folder), random.Random(f"{seed} {name}")), chosen.timeout_s)
            )
        except Exception as error:  # noqa: BLE001 - an attack that cannot be played must not hide the others
            traceback.print_exc()
            return chosen.title, [Line("played to its end", f"{type(error).__name__}: {error}", "yes", holds=False)]
    return chosen.title, lines or [Line("reports lines", "no line", "at least one", holds=False)]


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, help="attacks to play (default: all)")


PROGRAM = Program("Play attacks on running stacks.", play, _add_arguments)
