"""Measurements that pages name come from one file, `docs/results.toml`, so that no page differs from another.

    python -m docs.site.results [--take reports/demo.json ...]

A block of a page begins with its text as a comment, in which `{chaos.kafka.client.turns_acked:,}` is a value of the
file. What follows the comment is written by this program; a test compares.

    <!-- results
    {demo.0.failed_requests} requests failed.
    -->
    0 requests failed.
    <!-- end of results -->

After the colon stands a format of Python's, or `p`: a share as a number of percent. `--take` reads the report of a
target and takes from it those values that pages name.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from docs.site.pages import ROOT
from headrace_operations.toml_text import key, toml

FILE = ROOT / "docs" / "results.toml"
PAGES = ("README.md", "docs/controls.md", "docs/evidence.md", "docs/guides/sizing.md")
BLOCK = re.compile(r"(<!-- results\n(.*?)-->\n).*?(<!-- end of results -->)", re.DOTALL)
FIELD = re.compile(r"\{([^{}:]+)(?::([^{}]+))?\}")
Values = Mapping[str, Any]


def results() -> dict[str, Any]:
    """Target to its values, as its report has them."""
    return tomllib.loads(FILE.read_text(encoding="utf-8"))


def written(text: str, found: Values) -> str:
    """A page with its blocks as the results are. Raises `KeyError` for a value that is not there."""

    def filled(block: re.Match[str]) -> str:
        shown = FIELD.sub(lambda one: as_text(at(found, one[1]), one[2] or ""), block[2])
        return block[1] + shown + block[3]

    return BLOCK.sub(filled, text)


def named(text: str) -> Iterator[str]:
    """The paths of all values that a page names."""
    for block in BLOCK.finditer(text):
        yield from (field[1] for field in FIELD.finditer(block[2]))


def at(found: Values, path: str) -> Any:
    """The value there. Raises `KeyError`."""
    value: Any = found
    for part in path.split("."):
        if not isinstance(value, Mapping) or part not in value:
            raise KeyError(f"{path}: {FILE.name} has no such value; take a report that has it, or write it there")
        value = value[part]
    return value


def as_text(value: Any, form: str) -> str:
    """A value as a page shows it. `,` also puts commas into the numbers of a text such as `0 of 3269`."""
    if form == "p":
        return f"{value * 100:.0f}"
    if isinstance(value, str):
        return re.sub(r"\d{4,}", lambda one: f"{int(one[0]):,}", value) if form == "," else value
    return format(value, form)


def paths(values: Values, before: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every single value with its path."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from paths(value, (*before, name))
        else:
            yield (*before, name), value


def as_toml(found: Values) -> str:
    """The file without its head: a table for each target."""
    tables = []
    for target, values in found.items():
        lines = (f"{'.'.join(map(key, path))} = {toml(value)}\n" for path, value in paths(values))
        tables.append(f"\n[{key(target)}]\n" + "".join(lines))
    return "".join(tables)


def _arms(report: Values) -> Values:
    """Runs by their names, in which a page has no colon: its format stands behind one."""
    return {**report, "runs": {one["arm"].replace(":", " "): one for one in report["runs"]}}


def _attack(report: Values) -> Values:
    """The figures of an attack by the places of their lines. One that was not played to its end has other lines."""
    held = {
        name: one["lines"] for name, one in report["attacks"].items() if all(line["holds"] for line in one["lines"])
    }
    figures = {name: [line["figure"] for line in lines] for name, lines in held.items()}
    return {name: {str(place): figure for place, figure in enumerate(one)} for name, one in figures.items()}


def _bus(report: Values) -> Values:
    """And how the best rates compare."""
    rates = {bus: found["per_s"] for bus, found in report.get("rates", {}).items() if "per_s" in found}
    if rates.keys() < {"embedded", "kafka"}:
        return report
    ours, theirs = rates["embedded"], rates["kafka"]
    return {**report, "share_of_kafka": {name: ours[name]["best"] / theirs[name]["best"] for name in theirs}}


def _compose(report: Values) -> Values:
    """And what images add to their base, those with torch apart."""
    added = [one["added_mb"] for name, one in report["images"].items() if name not in ("inference", "trainer")]
    return {**report, "added_mb": {"least": min(added), "most": max(added)}}


def _example(report: Values) -> Values:
    """The first seed that was played, its rows by what they counted."""
    first = report["seeds"][0]
    return {**first, "rows": {str(row["at"]): row for row in first["rows"]}}


def _learning(report: Values) -> Values:
    """What corrections leave, in training and of the very first batch."""
    left = {"training": f"after {report['after']}: ", "the first batch": "after 0: "}
    found = {}
    for when, mark in left.items():
        shares = [one["value"] for one in report["lines"] if one["name"].startswith("left by") and mark in one["name"]]
        found[when] = {"least": min(shares), "most": max(shares)}
    return {**report, "left": found}


def _simulate(report: Values) -> Values:
    totals = {name: sum(report[name].values()) for name in ("faults", "checks")}
    return {**report, "total": {**totals, "failed": len(report["failed"])}}


def _trainer(report: Values) -> Values:
    """Workloads beside the peer by model and length."""
    peers = {
        f"{one['model']}, {'up to' if one['mixed'] else 'all'} {one['length']}": one for one in report.get("peers", ())
    }
    return {**report, "peers": peers}


READERS: dict[str, Callable[[Values], Values]] = {
    "attack": _attack,
    "bench-algorithms": _arms,
    "bench-bus": _bus,
    "bench-learning": _arms,
    "bench-learning-hot": _arms,
    "bench-trainer": _trainer,
    "compose": _compose,
    "demo": lambda report: {str(report["seed"]): report},
    "example-email": _example,
    "example-math": _example,
    "example-werewolf": _example,
    "simulation": _simulate,
    "learning": _learning,
}
"""What pages name differently than the report has it. Other reports are read as they are."""


def take(path: Path, found: dict[str, Any], wanted: Mapping[str, None]) -> list[str]:
    """Put what a report has of the `wanted` values into `found`. Returns the paths that the report does not have."""
    target = path.stem
    report = READERS.get(target, dict)(json.loads(path.read_text(encoding="utf-8")))
    missing = []
    for name in wanted:
        first, _, rest = name.partition(".")
        if first != target:
            continue
        try:
            value = at(report, rest)
        except KeyError:
            missing.append(name)
            continue
        place = found
        *folders, last = name.split(".")
        for folder in folders:
            place = place.setdefault(folder, {})
        place[last] = round(value, 4) if isinstance(value, float) else value
    return missing


def main() -> None:
    """Write the pages."""
    parser = argparse.ArgumentParser(description="Write measurements into the pages that name them.")
    parser.add_argument("--take", type=Path, nargs="+", default=[], metavar="REPORT", help="reports/demo.json, ...")
    options = parser.parse_args()
    texts = {page: (ROOT / page).read_text(encoding="utf-8") for page in PAGES}
    found = results()
    for path in options.take:
        for name in take(path, found, dict.fromkeys(name for text in texts.values() for name in named(text))):
            sys.stdout.write(f"{path} has no {name}: it stays as it was\n")
    if options.take:
        head = FILE.read_text(encoding="utf-8").partition("\n[")[0]
        FILE.write_text(head + as_toml(found), encoding="utf-8")
    for page, text in texts.items():
        (ROOT / page).write_text(written(text, found), encoding="utf-8")


if __name__ == "__main__":
    main()
