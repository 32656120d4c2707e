"""`python -m tests.chaos --bus both --seed 7 --strikes 9` writes reports/chaos.json; exit status 1: a promise broke."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import signal
import sys
from pathlib import Path

from headrace.errors import HeadraceError
from headrace_cli.progress import ProgressDisplay
from tests.chaos import report
from tests.chaos.nemeses import NEMESES
from tests.chaos.run import Options, Outcome, run
from tests.chaos.victims import BUS
from tests.support import kafka_node, reaper


def main() -> int:
    reaper.start()
    arguments = _arguments()
    seed = random.SystemRandom().randrange(2**32) if arguments.seed is None else arguments.seed
    buses = list(BUS) if arguments.bus == "both" else [arguments.bus]
    print(f"chaos: SEED={seed} KILLS={arguments.strikes} on {' and '.join(buses)}", flush=True)
    results: dict[str, object] = {}
    held = True
    for bus in buses:
        if bus == "kafka" and (reason := kafka_node.missing()):
            print(f"NOT RUN on kafka: {reason}")
            results[bus] = {"not_run": reason}
            held = held and arguments.bus == "both"
            continue
        nemeses = _nemeses(bus, arguments.nemesis)
        options = Options(bus, seed, nemeses, arguments.strikes, arguments.rate, arguments.pause)
        outcome = _run(options, arguments.keep)
        results[bus] = outcome if isinstance(outcome, dict) else report.as_json(outcome)
        print("\n".join([outcome["stopped"]] if isinstance(outcome, dict) else report.table(outcome)), flush=True)
        if isinstance(outcome, dict) or outcome.findings.broken:
            held = False
            again = f"make chaos SEED={seed} KILLS={arguments.strikes} BUS={bus} NEMESIS={','.join(nemeses)}"
            print(f"again with: {again}", flush=True)
    arguments.report.parent.mkdir(parents=True, exist_ok=True)
    arguments.report.write_text(json.dumps({"seed": seed, "held": held, **results}, indent=2) + "\n")
    return 0 if held else 1


def _nemeses(bus: str, wanted: list[str]) -> tuple[str, ...]:
    """Those of `wanted` that can be played on this bus; why the others cannot is said."""
    missing = {name: reason for name in wanted if (reason := NEMESES[name].missing(bus))}
    for name, reason in missing.items():
        print(f"NOT PLAYED on {bus}: {name}: {reason}", flush=True)
    return tuple(name for name in wanted if name not in missing)


def _run(options: Options, keep: Path | None) -> Outcome | dict[str, str]:
    """The outcome, or why there is none: something did not come back."""
    try:
        return asyncio.run(_until_told(options, keep))
    except (TimeoutError, HeadraceError) as error:
        return {"stopped": f"{options.bus} bus, seed {options.seed}: {type(error).__name__}: {error}"}


async def _until_told(options: Options, keep: Path | None) -> Outcome:
    """Run; a signal ends everything that was started."""
    with ProgressDisplay(f"chaos on {options.bus}", options.strikes, unit="strikes", estimate=False) as progress:
        task = asyncio.ensure_future(run(options, progress, keep))
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            with contextlib.suppress(NotImplementedError):
                loop.add_signal_handler(number, task.cancel)
        return await task


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bus", choices=[*BUS, "both"], default="both")
    parser.add_argument("--seed", type=int, help="of the strikes and the load; drawn and printed when not given")
    parser.add_argument(
        "--nemesis",
        type=_names,
        default=[*NEMESES],
        help=f"comma between them; all when not given: {', '.join(NEMESES)}",
    )
    parser.add_argument("--strikes", type=int, default=100)
    parser.add_argument("--rate", type=float, default=50.0, help="turns per second")
    parser.add_argument("--pause", type=float, default=3.0, help="mean seconds between two strikes")
    parser.add_argument("--keep", type=Path, help="an empty folder in which data and logs stay")
    parser.add_argument("--report", type=Path, default=Path("reports/chaos.json"))
    return parser.parse_args()


def _names(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in NEMESES]:
        raise argparse.ArgumentTypeError(f"no nemesis {unknown[0]!r}; there are {', '.join(NEMESES)}")
    return names


if __name__ == "__main__":
    sys.exit(main())
