"""Trainer and `torch` engine on one GPU: `make bench NAME=gpu`. Writes `reports/bench-gpu.json` in twelve minutes.

Models are random, of the sizes of Qwen3-0.6B and Qwen3-8B, in bfloat16, and built for the run. The lines:

- logprobs and gradients of packed rows, causal and with a window, in float32, under autocast, with master weights,
  with adapters, compiled and recomputed, agree with those in float64 on the CPU: relative error of all gradients
  together at most 1e-4 in float32 and 3e-2 in bfloat16;
- a step of full training on 64 sequences of 4,096 tokens, in passes of 32,768, reaches 40 % of the device's nominal
  bfloat16 rate, and waits for the device once. `GpuShape.flops` counts the operations of a step:
  6 x weights x tokens, 12 x layers x width x pairs of tokens for attention, the head for loss tokens only, and no
  recomputation. The nominal rate is the maker's, without sparsity; the device's measured rate on matrices of 8,192
  and the share of it are reported as well;
- the head of 32,768 loss tokens at 152,000 words holds at most 1.5 GB on top of weights and hidden states, including
  the gradients of both;
- a step on one sequence of 32,768 tokens with adapters on Qwen3-8B holds less than 60 GB;
- 64 streams of the 0.6B model continue through swaps of adapters and of whole models, none fails, and the trainer
  computes the logprobs of each turn with the version that it names: mean difference at most 0.02 nats, the rounding
  of bfloat16, and at least ten times that with another version.

Exit status 1 if a line does not hold, 2 without a CUDA device. Steps with adapters, and with sequences of mixed
lengths, have no line.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks._gpu_step import nominal_tflops

SHARE_MIN = 0.4
HEAD_GB_MAX = 1.5
LARGE_GB_MAX = 60.0
GRADIENTS_MAX = {"float32": 1e-4, "bfloat16": 3e-2}
LOGPROBS_MEAN_MAX, ANOTHER_TIMES_MIN = 0.02, 10.0
CHILD_S_MAX = 300
Report = dict[str, Any]


def child(module: str, *arguments: str) -> Report:
    """Return the last line that a measurement in a process of its own prints. Its other output goes to standard
    error."""
    command = [sys.executable, "-m", f"benchmarks.{module}", *arguments]
    process = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, timeout=CHILD_S_MAX)
    if process.returncode:
        return {"failed": f"{module} ended with status {process.returncode}"}
    result: Report = json.loads(process.stdout.splitlines()[-1])
    return result


def matmul_tflops(size: int = 8192, times: int = 20) -> float:
    """Return the matrix product rate on random numbers: the median of several."""
    left, right = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    took = []
    for _ in range(times):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        torch.mm(left, right)
        end.record()
        end.synchronize()
        took.append(begin.elapsed_time(end))
    return float(2 * size**3 / sorted(took)[times // 2] / 1e9)


def correct(_: Report, missed: list[str]) -> Report:
    result = child("_gpu_correct")
    for way, of in result.items() if "failed" not in result else ():
        most = GRADIENTS_MAX["float32" if "float32" in way else "bfloat16"]
        if not of["gradients"] <= most:
            missed.append(f"{way}: gradients differ from float64's by {of['gradients']:.2g}, at most {most:g}")
    return result


def with_shares(result: Report, machine: Report) -> Report:
    nominal = machine["nominal_tflops"]
    shares = {"share_of_matmul": round(result["tflops"] / machine["matmul_tflops"], 3)} if "tflops" in result else {}
    return result | shares | ({"share_of_nominal": round(result["tflops"] / nominal, 3)} if nominal and shares else {})


def full(machine: Report, missed: list[str]) -> Report:
    result = with_shares(child("_gpu_step", "--sequences", "64"), machine)
    kind = "share_of_nominal" if machine["nominal_tflops"] else "share_of_matmul"
    if not result.get(kind, 0) >= SHARE_MIN:
        missed.append(f"full training: {kind} is {result.get(kind)}, at least {SHARE_MIN:g}")
    if not result.get("waits", 9) <= 1:
        missed.append(f"full training: the program waited {result.get('waits')} times for the device in a step")
    return result


def lora(machine: Report, _: list[str]) -> Report:
    return with_shares(child("_gpu_step", "--sequences", "64", "--lora", "--steps", "1"), machine)


def mixed(machine: Report, _: list[str]) -> Report:
    return with_shares(child("_gpu_step", "--sequences", "64", "--mixed", "--steps", "1"), machine)


def plain(machine: Report, _: list[str]) -> Report:
    """Measure a step with the default settings."""
    arguments = ("--sequences", "32", "--plain", "--weights", "float32", "--pack-tokens", "4096", "--steps", "1")
    return with_shares(child("_gpu_step", *arguments), machine)


def head(_: Report, missed: list[str]) -> Report:
    results = {name: child("_gpu_head", *arguments) for name, arguments in (("compiled", ()), ("plain", ("--plain",)))}
    for name, result in results.items():
        if not result.get("peak_gb", 9e9) <= HEAD_GB_MAX:
            missed.append(f"head, {name}: {result.get('peak_gb')} GB, at most {HEAD_GB_MAX:g}")
    return results


def large(machine: Report, missed: list[str]) -> Report:
    arguments = ("--shape", "8b", "--lora", "--length", "32768", "--sequences", "1", "--recompute", "--steps", "0")
    result = with_shares(child("_gpu_step", *arguments), machine)
    if not result.get("reserved_gb", 9e9) < LARGE_GB_MAX:
        missed.append(f"Qwen3-8B, adapters, 32,768 tokens: {result.get('reserved_gb')} GB, less than {LARGE_GB_MAX:g}")
    return result


def engine(_: Report, missed: list[str]) -> Report:
    result = child("_gpu_engine")
    if "failed" in result and "turns" not in result:
        missed.append(f"engine: {result['failed']}")
        return result
    if result["failed"]:
        missed.append(f"engine: {result['failed']} requests failed: {result['failures']}")
    for kind, differences in result["trainer"].items():
        if not differences["mean"] <= LOGPROBS_MEAN_MAX:
            missed.append(
                f"engine, {kind}: logprobs differ by {differences['mean']:.2g} nats, at most {LOGPROBS_MEAN_MAX:g}"
            )
        if not differences["another_version_mean"] >= ANOTHER_TIMES_MIN * differences["mean"]:
            missed.append(
                f"engine, {kind}: another version's logprobs are as near: {differences['another_version_mean']:.2g}"
            )
    return result


MEASURED: dict[str, Callable[[Report, list[str]], Report]] = {
    measure.__name__: measure for measure in (full, engine, head, large, lora, correct, mixed, plain)
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=MEASURED, default=[*MEASURED])
    parser.add_argument("--out", type=Path, default=Path("reports/bench-gpu.json"))
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device: torch finds none, and this benchmark needs one", file=sys.stderr)
        return 2
    device = torch.cuda.get_device_name()
    rates = {"matmul_tflops": round(matmul_tflops(), 1), "nominal_tflops": nominal_tflops(device)}
    machine: Report = {"device": device, "torch": torch.__version__, **rates}
    report: Report = {"machine": machine}
    missed: list[str] = []
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for name in options.only:
        began, before = time.monotonic(), len(missed)
        report[name] = MEASURED[name](machine, missed)
        if "failed" in report[name] and report[name]["failed"] and before == len(missed):
            missed.append(f"{name}: {report[name]['failed']}")
        report[name]["wall_s"] = round(time.monotonic() - began, 1)
        print(f"{name}: {json.dumps(report[name])}", flush=True)
        options.out.write_text(json.dumps(report | {"missed": missed}, indent=2) + "\n")
    for line in missed:
        print(f"does not hold: {line}", file=sys.stderr)
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
