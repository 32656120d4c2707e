"""Memory, disk and speed of trainings and replicas by model size: `python -m benchmarks.sizing`.

For each shape (0.4, 35 and 135 million parameters, and 0.5 billion; random weights), for all weights and for LoRA, in
float32 and in bfloat16, the benchmark measures in separate processes:

- the peak memory of a trainer that opens the base, takes two steps of two passes each and saves a version after each;
- the disk space of a version and of a restore point;
- the memory of a replica that has loaded the base and two versions, and its peak while loading;
- trained and sampled tokens per second, which depend on the machine and its load.

The acceptance line: each size that `headrace config check` computes is within 20 % of the measured one. The exit status
is 1 if it does not hold. A case that needs more memory than the machine has free is not measured, and the report names
it. The benchmark writes `reports/bench-sizing.json` after each case, keeps the figures of cases that `--only` leaves
out, and takes about 20 minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks._steps import SIZES
from headrace_cli.terminal import ProgressDisplay
from headrace_trainer.settings import TrainerSettings
from headrace_trainer.sizes import Shape, Sizes

TOLERANCE = 0.2
FREE_SHARE = 0.9
"""Share of the free memory that a case may need."""
CHILD_S_MAX = 1800
MB = 1e6
COMPARED = ("trainer", "replica", "loading", "version", "restore_point")
"""Sizes with a computed value, by their names in `Sizes`."""
KINDS: Mapping[str, dict[str, Any]] = {"all weights": {}, "LoRA": {"lora": {"rank": 16}}}
DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True, slots=True)
class Case:
    """One training run: shape, trained weights and precision."""

    shape: str
    kind: str
    dtype: str

    @property
    def name(self) -> str:
        return f"{self.shape}, {self.kind}, {self.dtype}"

    def settings(self, base: Path) -> dict[str, Any]:
        return {"base": str(base), **KINDS[self.kind], "compute": {"device": "cpu", "dtype": self.dtype}}

    def sizes(self, base: Path) -> Sizes:
        settings = TrainerSettings.model_validate(self.settings(base))
        shape = Shape.read(base, settings.lora)
        assert shape is not None
        return Sizes.of(shape, settings)


def cases(only: str) -> Iterator[Case]:
    """Yield the cases whose names contain `only`."""
    for shape in SIZES:
        for kind in KINDS:
            for dtype in DTYPES:
                if only in (case := Case(shape, kind, dtype)).name:
                    yield case


def measure(case: Case, base: Path, scratch: Path) -> dict[str, Any]:
    """Run the training and the replica of a case."""
    settings = json.dumps(case.settings(base))
    trained = _child("train", "--blobs", str(scratch / "blobs"), "--settings", settings)
    served = _child("serve", "--blobs", str(scratch / "blobs"))
    sizes = case.sizes(base)
    return {
        "parameters": trained["parameters"],
        "pack_tokens": trained["pack_tokens"],
        "mb": {name: round((trained | served)[f"{name}_bytes"] / MB, 1) for name in COMPARED},
        "computed_mb": {name: round(getattr(sizes, f"{name}_bytes") / MB, 1) for name in COMPARED},
        "trained_tokens_per_s": round(trained["trained_per_s"]),
        "sampled_tokens_per_s": round(served["sampled_per_s"]),
    }


def _child(*arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks._sizing_parts", *arguments]
    process = subprocess.run(command, capture_output=True, text=True, check=False, timeout=CHILD_S_MAX)
    if process.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{process.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return result


def missed(results: Mapping[str, Any]) -> list[str]:
    """Return the sizes that differ from the computed ones by more than the tolerance."""
    return [
        f"{name}, {size}: {result['computed_mb'][size]:,.0f} MB computed, {result['mb'][size]:,.0f} MB measured"
        for name, result in results.items()
        for size in COMPARED
        if abs(result["computed_mb"][size] - result["mb"][size]) > TOLERANCE * result["mb"][size]
    ]


def free_bytes() -> int:
    """Return the memory that new processes can use."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="measure the cases whose names contain this, such as 135m")
    parser.add_argument("--out", type=Path, default=Path("reports/bench-sizing.json"))
    options = parser.parse_args()
    chosen = list(cases(options.only))
    results: dict[str, Any] = json.loads(options.out.read_text())["cases"] if options.out.exists() else {}
    too_large: dict[str, int] = {}
    with ProgressDisplay("bench-sizing", len(chosen), unit="cases") as progress:
        for case in chosen:
            progress.update(activity=case.name)
            with tempfile.TemporaryDirectory(prefix="bench-sizing-") as scratch:
                base = SIZES[case.shape].build(Path(scratch))
                needed = case.sizes(base).trainer_bytes
                if needed > FREE_SHARE * free_bytes():
                    too_large[case.name] = round(needed / MB)
                    continue
                results[case.name] = measure(case, base, Path(scratch))
            print(f"{case.name}: {json.dumps(results[case.name])}", flush=True)
            _write(options.out, results, too_large)
            progress.advance()
    lines = missed(results)
    for line in lines:
        print(f"does not hold: {line}", file=sys.stderr)
    for name, needed_mb in too_large.items():
        print(f"not measured: {name} needs {needed_mb:,} MB", file=sys.stderr)
    return bool(lines or too_large)


def _write(path: Path, results: Mapping[str, Any], too_large: Mapping[str, int]) -> None:
    machine = f"{os.cpu_count()} cores, {platform.processor() or platform.machine()}"
    report = {"machine": machine, "cases": results, "not_measured_mb": too_large, "missed": missed(results)}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
