"""`make parity`: every program, a table of all items, `reports/parity.json`; status 1 when one fails."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import traceback
from pathlib import Path

from tests.parity.page import Item, items, problems
from tests.parity.programs import ALL
from tests.parity.stage import OWN, PROGRAMS, Stage

REPORT = Path("reports") / "parity.json"
assert len(ALL) > 1


def played(names: list[str], folder: Path) -> dict[str, tuple[str | None, float]]:
    """Why each program failed (None: it did not), and its seconds. Those of the shared stack come together."""
    stage = Stage(folder)
    found: dict[str, tuple[str | None, float]] = {}

    def play(chosen: list[str]) -> None:
        for name in chosen:
            began, failure = time.monotonic(), None
            try:
                PROGRAMS[name](stage)
            except Exception as error:  # noqa: BLE001 (whatever it is, its items fail)
                traceback.print_exc()
                failure = f"{type(error).__name__}: {error}"[:400]
            found[name] = failure, round(time.monotonic() - began, 1)
            print(f"{name:12} {'pass' if failure is None else 'FAIL'} {found[name][1]:7.1f} s", flush=True)

    shared = [name for name in names if name not in OWN]
    if shared:
        with stage.shared():
            play(shared)
    play([name for name in names if name in OWN])
    return found


def table(rows: list[Item], found: dict[str, tuple[str | None, float]]) -> str:
    lines = []
    for item in rows:
        failure = found[item.program][0]
        state = "not" if item.verdict == "not" and failure is None else "FAIL" if failure else "pass"
        lines.append(f"{item.id}  {state:4}  {item.verdict:5}  {item.program:12}  {item.asked.replace('`', '')}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", choices=sorted(PROGRAMS), help="these programs alone")
    names = parser.parse_args().only or list(PROGRAMS)
    began = time.monotonic()
    wrong = problems(items(), set(PROGRAMS))
    with tempfile.TemporaryDirectory(prefix="headrace-parity-") as folder:
        found = played(names, Path(folder))
    rows = [item for item in items() if item.program in found]
    print(table(rows, found))
    for line in wrong:
        print(f"docs/parity.md: {line}")
    failed = [item.id for item in rows if found[item.program][0]]
    seconds = round(time.monotonic() - began, 1)
    print(f"{len(rows) - len(failed)} of {len(rows)} items pass, {seconds} s")
    told = [
        {"id": one.id, "program": one.program, "verdict": one.verdict, "passes": one.id not in failed} for one in rows
    ]
    runs = {name: {"failure": failure, "seconds": took} for name, (failure, took) in found.items()}
    REPORT.parent.mkdir(exist_ok=True)
    REPORT.write_text(json.dumps({"items": told, "programs": runs, "page": wrong, "seconds": seconds}, indent=2) + "\n")
    return int(bool(failed or wrong))


if __name__ == "__main__":
    sys.exit(main())
