"""Measurements that several pages name come from one file, `docs/results.toml`, so that no page differs from another.

    python -m docs.site.results [--take reports/demo.json]

Each block between `<!-- results: NAME -->` and `<!-- end of results -->` is written anew; a test compares.
"""

from __future__ import annotations

import argparse
import json
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from docs.site.pages import ROOT

FILE = ROOT / "docs" / "results.toml"
PAGES = ("README.md", "docs/evidence.md", "docs/guides/sizing.md")
BLOCK = re.compile(r"(<!-- results: (\w+) -->\n).*?(<!-- end of results -->)", re.DOTALL)
Run = Mapping[str, Any]


def results() -> dict[str, list[dict[str, Any]]]:
    """Target to its runs, the one that the README shows first."""
    return tomllib.loads(FILE.read_text(encoding="utf-8"))


def _success(run: Run, unit: str = " %") -> str:
    return f"{run['before'] * 100:.0f}{unit} → {run['after'] * 100:.0f} %"


def _demo(runs: Sequence[Run]) -> str:
    run = runs[0]
    calls = f"{run['turns_captured']:,} ({run['turns_of_the_gate']:,})"
    where = f"{run['machine']}, {run['wall_s']} s, seed {run['seed']}"
    return (
        "| held-out success | calls captured (of them by the gate) | trained | swaps | failed requests | machine |\n"
        "|---|---|---|---|---|---|\n"
        f"| {_success(run)} | {calls} | {run['turns_trained']:,} | {run['swaps']} | {run['failed_requests']} "
        f"| {where} |\n"
    )


def _demo_seeds(runs: Sequence[Run]) -> str:
    lines = [
        "| `SEED` | before → after | versions that took over | failed requests | in all |",
        "|---|---|---|---|---|",
    ]
    for run in runs:
        failed = f"{run['failed_requests']} of {run['requests']:,}"
        time = ", ".join(filter(None, (f"{run['wall_s']} s", run.get("note"))))
        lines.append(f"| {run['seed']} | {_success(run, '')} | {run['swaps']} | {failed} | {time} |")
    return "\n".join(lines) + "\n"


def _demo_sentence(runs: Sequence[Run]) -> str:
    run = runs[0]
    rise = f"{run['before'] * 100:.0f} to {run['after'] * 100:.0f} %"
    return f"Measured in `make demo`: {run['turns_trained']:,} trained turns took held-out success from {rise}.\n"


BLOCKS: dict[str, Callable[[Sequence[Run]], str]] = {
    "demo": _demo,
    "demo_seeds": _demo_seeds,
    "demo_sentence": _demo_sentence,
}


def written(text: str) -> str:
    """A page with its blocks as the results are."""
    found = results()
    return BLOCK.sub(lambda block: block[1] + BLOCKS[block[2]](found["demo"]) + block[3], text)


def _take(path: Path) -> None:
    """Put the report of a demo in the place of the run with its seed."""
    report = json.loads(path.read_text(encoding="utf-8"))
    runs = results()["demo"]
    run = next(one for one in runs if one["seed"] == report["seed"])
    run |= {name: report[name] for name in ("swaps", "failed_requests", "requests", "turns_captured", "turns_trained")}
    run |= {"before": round(report["before"], 3), "after": round(report["after"], 3)}
    run |= {"turns_of_the_gate": report["turns_dropped"].get("eval", 0), "wall_s": round(report["wall_s"])}
    head = FILE.read_text(encoding="utf-8").split("\n[[", 1)[0]
    tables = ["\n[[demo]]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in one.items()) for one in runs]
    FILE.write_text(head + "".join(tables), encoding="utf-8")


def main() -> None:
    """Write the pages."""
    parser = argparse.ArgumentParser(description="Write measurements into the pages that name them.")
    parser.add_argument("--take", type=Path, metavar="REPORT", help="reports/demo.json of a new run")
    options = parser.parse_args()
    if options.take:
        _take(options.take)
    for page in PAGES:
        path = ROOT / page
        path.write_text(written(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
