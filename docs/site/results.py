"""Measurements on pages, taken from one file, `docs/results.toml`, so that all pages agree.

python -m docs.site.results [--take reports/demo.json ...]

A block of a page names its text in `docs/site/templates.toml`, in which `{chaos.kafka.client.turns_acked:,}` is a
value of the file. This program writes the text between the two comments of the block; a test compares.

<!-- results: demo -->
0 requests failed.
<!-- end of results -->

After the colon of a value comes a format of Python's, or `p`: a share as a number of percent. `--take` reads the report
of a program and takes the values that pages name.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from docs.site.assemble import ROOT
from headrace_operations.supervisor.overrides import key, toml

FILE = ROOT / "docs" / "results.toml"
PAGES = ("README.md", "docs/controls.md", "docs/evidence.md", "docs/guides/sizing.md", "examples/smollm2/README.md")
TEMPLATES = ROOT / "docs" / "site" / "templates.toml"
BLOCK = re.compile(r"(<!-- results: ([\w-]+) -->\n).*?(<!-- end of results -->)", re.DOTALL)
FIELD = re.compile(r"\{([^{}:]+)(?::([^{}]+))?\}")
Values = Mapping[str, Any]


def results() -> dict[str, Any]:
    """Return the values of each target by its name."""
    return tomllib.loads(FILE.read_text(encoding="utf-8"))


def templates() -> dict[str, str]:
    """Return the text of each block by its name."""
    return tomllib.loads(TEMPLATES.read_text(encoding="utf-8"))


def written(text: str, values: Values, texts: Mapping[str, str]) -> str:
    """Return the page with its blocks filled. Raises `KeyError` for a value or a template that does not exist."""

    def filled(block: re.Match[str]) -> str:
        if block[2] not in texts:
            raise KeyError(f"results: {block[2]}: {TEMPLATES.name} has no such text; write it there")
        fields = FIELD.sub(lambda field: as_text(at(values, field[1]), field[2] or ""), texts[block[2]])
        return block[1] + fields + block[3]

    return BLOCK.sub(filled, text)


def named(texts: Mapping[str, str]) -> dict[str, None]:
    """Return the paths of all values that the templates name."""
    return dict.fromkeys(field[1] for text in texts.values() for field in FIELD.finditer(text))


def at(values: Values, path: str) -> Any:
    """Return the value at a dotted path. Raises `KeyError`."""
    value: Any = values
    for part in path.split("."):
        if not isinstance(value, Mapping) or part not in value:
            raise KeyError(f"{path}: {FILE.name} has no such value; take a report that has it, or write it there")
        value = value[part]
    return value


def as_text(value: Any, form: str) -> str:
    """Format a value for a page. `,` also puts commas into the numbers of a text such as `0 of 3269`.

    A median becomes `0.9 (0.8–1.0)`, with the least and the greatest value if they differ.
    """
    if isinstance(value, Mapping):
        median, least, most = (as_text(value[name], form) for name in ("median", "least", "most"))
        return median if least == most else f"{median} ({least}–{most})"
    if form == "p":
        return f"{value * 100:.0f}"
    if isinstance(value, str):
        return re.sub(r"\d{4,}", lambda digits: f"{int(digits[0]):,}", value) if form == "," else value
    return format(value, form)


def paths(values: Values, before: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield each value with its path."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from paths(value, (*before, name))
        else:
            yield (*before, name), value


def as_toml(all_values: Values) -> str:
    """Return the file without its head: a table for each target."""
    tables = []
    for target, values in all_values.items():
        lines = (f"{'.'.join(map(key, path))} = {toml(value)}\n" for path, value in paths(values))
        tables.append(f"\n[{key(target)}]\n" + "".join(lines))
    return "".join(tables)


def _arms(report: Values) -> Values:
    """Return the report with its runs by name. A colon becomes a blank, because templates write a format after it."""
    return {**report, "runs": {run["arm"].replace(":", " "): run for run in report["runs"]}}


def _attack(report: Values) -> Values:
    """Return the figures of each attack by the position of their line.

    Attacks with a line that does not hold are left out, because an attack that ended early has other lines.
    """
    held_lines = {
        name: lines_of_attack["lines"]
        for name, lines_of_attack in report["attacks"].items()
        if all(line["holds"] for line in lines_of_attack["lines"])
    }
    figures = {name: [line["figure"] for line in lines] for name, lines in held_lines.items()}
    return {
        name: {str(position): figure for position, figure in enumerate(lines_of_attack)}
        for name, lines_of_attack in figures.items()
    }


def _bus(report: Values) -> Values:
    """Add the best rates of the embedded bus as shares of Kafka's best rates."""
    rates = {bus: bus_report["per_s"] for bus, bus_report in report.get("rates", {}).items() if "per_s" in bus_report}
    if rates.keys() < {"embedded", "kafka"}:
        return report
    embedded, kafka = rates["embedded"], rates["kafka"]
    return {**report, "share_of_kafka": {name: embedded[name]["best"] / kafka[name]["best"] for name in kafka}}


def _compose(report: Values) -> Values:
    """Add the smallest and the largest size that images without torch add to their base."""
    added = [image["added_mb"] for name, image in report["images"].items() if name not in ("inference", "trainer")]
    return {**report, "added_mb": {"least": min(added), "most": max(added)}}


def _example(report: Values) -> Values:
    """Return the median, least and greatest value over the seeds, the rows by their count."""
    seeds = [{**seed, "rows": {str(row["at"]): row for row in seed["rows"]}} for seed in report["seeds"]]
    return {"seeds": len(seeds), **_over_seeds(seeds)}


def _over_seeds(seeds: Sequence[Values]) -> Values:
    """Replace each number by its median, least and greatest value; leave out what is no number."""
    spreads: dict[str, Any] = {}
    for name, value in seeds[0].items():
        values = [seed[name] for seed in seeds]
        if isinstance(value, Mapping):
            spreads[name] = _over_seeds(values)
        elif isinstance(value, int | float):
            spread = {"median": statistics.median(values), "least": min(values), "most": max(values)}
            spreads[name] = {which: round(number, 4) for which, number in spread.items()}
    return spreads


def _learning(report: Values) -> Values:
    """Add the remainders of corrections, in training and of the very first batch."""
    left = {"training": f"after {report['after']}: ", "the first batch": "after 0: "}
    shares_left = {}
    for when, mark in left.items():
        shares = [
            line["value"] for line in report["lines"] if line["name"].startswith("left by") and mark in line["name"]
        ]
        shares_left[when] = {"least": min(shares), "most": max(shares)}
    return {**report, "left": shares_left}


def _simulate(report: Values) -> Values:
    totals = {name: sum(report[name].values()) for name in ("faults", "checks")}
    return {**report, "total": {**totals, "failed": len(report["failed"])}}


def _trainer(report: Values) -> Values:
    """Add the measurements of the other trainer under keys with their model and length."""
    peers = {
        f"{peer['model']}, {'up to' if peer['mixed'] else 'all'} {peer['length']}": peer
        for peer in report.get("peers", ())
    }
    return {**report, "peers": peers}


READERS: dict[str, Callable[[Values], Values]] = {
    "attack": _attack,
    "bench-algorithms": _arms,
    "bench-bus": _bus,
    "bench-learning": _arms,
    "bench-learning-hot": _arms,
    "bench-learning-typed": _arms,
    "bench-trainer": _trainer,
    "compose": _compose,
    "demo": lambda report: {str(report["seed"]): report},
    "example-email": _example,
    "example-math": _example,
    "example-werewolf": _example,
    "simulation": _simulate,
    "learning": _learning,
}
"""Readers of reports whose values have other names on pages. Other reports are read as they are."""


def take(path: Path, values: dict[str, Any], names: Mapping[str, None]) -> list[str]:
    """Put the values called `names` of a report into `values`. Return the paths that the report does not have."""
    target = path.stem
    report = READERS.get(target, dict)(json.loads(path.read_text(encoding="utf-8")))
    missing = []
    for name in names:
        first, _, rest = name.partition(".")
        if first != target:
            continue
        try:
            value = at(report, rest)
        except KeyError:
            missing.append(name)
            continue
        table = values
        *folders, last = name.split(".")
        for folder in folders:
            table = table.setdefault(folder, {})
        table[last] = round(value, 4) if isinstance(value, float) else value
    return missing


def main() -> None:
    """Write the pages."""
    parser = argparse.ArgumentParser(description="Write measurements into the pages that name them.")
    parser.add_argument("--take", type=Path, nargs="+", default=[], metavar="REPORT", help="reports/demo.json, ...")
    options = parser.parse_args()
    texts = templates()
    values = results()
    for path in options.take:
        for name in take(path, values, named(texts)):
            sys.stdout.write(f"{path} has no {name}: it stays as it was\n")
    if options.take:
        head = FILE.read_text(encoding="utf-8").partition("\n[")[0]
        FILE.write_text(head + as_toml(values), encoding="utf-8")
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        (ROOT / page).write_text(written(text, values, texts), encoding="utf-8")


if __name__ == "__main__":
    main()
