"""`python -m tests.attack --only trajectory_door` plays attacks on running stacks and writes reports/attack.json.

An attack is a module of `tests.attack.attacks` with a `TITLE` and `async def attack(folder, rng) -> list[Line]`.
It starts its own servers in `folder`, on free ports, and stops them. Exit status 1: a line does not hold, or an attack
could not be played.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import logging
import pkgutil
import random
import sys
import tempfile
import time
import traceback
from pathlib import Path

import structlog

from headrace_cli.progress import ProgressDisplay
from tests.attack import attacks
from tests.attack.line import Line
from tests.support import reaper

NAMES = sorted(module.name for module in pkgutil.iter_modules(attacks.__path__))
TIMEOUT_S = 900.0


def main() -> int:
    reaper.start()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))  # lines are to be seen
    arguments = _arguments()
    seed = random.SystemRandom().randrange(2**32) if arguments.seed is None else arguments.seed
    print(f"attack: SEED={seed}, {len(arguments.only)} attacks", flush=True)
    results: dict[str, object] = {}
    held = True
    with ProgressDisplay("attack", len(arguments.only), unit="attacks") as progress:
        for done, name in enumerate(arguments.only):
            progress.at(done, doing=name)
            began = time.monotonic()
            title, lines = play(name, seed)
            took_s = round(time.monotonic() - began, 1)
            held = held and all(line.holds for line in lines)
            print(f"{name}: {title} ({took_s} s)", *lines, sep="\n", flush=True)
            results[name] = {"title": title, "took_s": took_s, "lines": [line.as_json() for line in lines]}
    arguments.report.parent.mkdir(parents=True, exist_ok=True)
    arguments.report.write_text(json.dumps({"seed": seed, "held": held, "attacks": results}, indent=2) + "\n")
    print("every line held" if held else f"BROKEN; again with: make attack SEED={seed}", flush=True)
    return 0 if held else 1


def play(name: str, seed: int) -> tuple[str, list[Line]]:
    """One attack's title and lines. What ends it early is a line that does not hold."""
    module = importlib.import_module(f"{attacks.__name__}.{name}")
    with tempfile.TemporaryDirectory(prefix=f"attack-{name}-", ignore_cleanup_errors=True) as folder:
        try:
            attack = module.attack(Path(folder), random.Random(f"{seed} {name}"))
            lines = asyncio.run(asyncio.wait_for(attack, getattr(module, "TIMEOUT_S", TIMEOUT_S)))
        except Exception as error:  # noqa: BLE001 - an attack that cannot be played must not hide the others
            traceback.print_exc()
            return module.TITLE, [Line("played to its end", f"{type(error).__name__}: {error}", "yes", False)]
    return module.TITLE, lines or [Line("says something", "no line", "at least one", False)]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, help="which; all when not given")
    parser.add_argument("--seed", type=int, help="drawn and printed when not given")
    parser.add_argument("--report", type=Path, default=Path("reports/attack.json"))
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
