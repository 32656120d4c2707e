"""`python -m tests.jobs`: writes `reports/test-jobs.json`; status 1 when a line does not hold."""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import sys
import tempfile
import time
from pathlib import Path

from headrace_cli.progress import ProgressDisplay
from tests.jobs.killing import Place, case_of, differences, killed, manifests, moments, set_aside, to_the_end, written
from tests.support import tiny_model

REPORT = Path("reports/test-jobs.json")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--algorithm", default="sft")
    parser.add_argument("--keep", type=Path, help="a new folder that is kept")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    options = parser.parse_args()
    draw = random.Random(options.seed)
    began = time.monotonic()
    with contextlib.ExitStack() as stack, ProgressDisplay("jobs", 3) as progress:
        progress.say(f"seed {options.seed}")
        temporary = tempfile.TemporaryDirectory(prefix="headrace-jobs-")
        folder = options.keep or Path(stack.enter_context(temporary))
        case = case_of(options.rows, options.seed, options.algorithm)
        base, rows = tiny_model.build(folder / "base", layers=1), written(case, folder / "rows.jsonl")
        disturbed = Place(folder / "work", base, rows)
        progress.at(0, doing="undisturbed")
        journal = to_the_end(case, disturbed)
        quiet = set_aside(disturbed, folder / "quiet")
        quiet_s = time.monotonic() - began
        progress.at(1, doing=f"killed {options.kills} times")
        log = killed(case, disturbed, moments(draw, options.kills, len(manifests(quiet))), draw)
        progress.at(2, doing="comparing")
        apart = differences(quiet, disturbed)
        other = json.dumps([len(manifests(quiet)), journal.trained])
    kills = sum(one["killed"] for one in log)
    lines = [
        {"name": "killed", "value": kills, "wanted": options.kills, "holds": kills == options.kills},
        {
            "name": "rows trained",
            "value": journal.trained,
            "wanted": options.rows,
            "holds": journal.trained == options.rows,
        },
        {"name": "differences from the undisturbed run", "value": len(apart), "wanted": 0, "holds": not apart},
    ]
    report = {
        "target": "test-jobs", "seed": options.seed, "algorithm": case.kind, "rows": options.rows, "lines": lines,
        "differences": apart, "kills": log, "versions_and_trained": json.loads(other), "version": journal.version,
        "undisturbed_s": round(quiet_s, 1), "wall_s": round(time.monotonic() - began, 1),
    }  # fmt: skip
    REPORT.parent.mkdir(exist_ok=True)
    REPORT.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    for line in lines:
        said = "holds" if line["holds"] else "DOES NOT HOLD"
        print(f"{said}: {line['name']}: {line['value']} (wanted {line['wanted']})")
    for one in apart:
        print(f"  {one}")
    return 0 if all(line["holds"] for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
