"""Trainer and `torch` engine on one GPU: `make bench-gpu`. Writes `reports/bench-gpu.json`; some twelve minutes.

Models are random, of the sizes of Qwen3-0.6B and Qwen3-8B, in bfloat16, built on the spot. The lines:

- logprobs and gradients of packed rows, plainly causal and with a window, in float32, under autocast, with masters,
  with adapters, compiled and recomputed, agree with those in float64 on the CPU: relative error of all gradients
  together at most 1e-4 in float32 and 3e-2 in bfloat16;
- a step of full training on 64 sequences of 4,096 tokens, passes of 32,768, multiplies at 40 % of the device's nominal
  rate in bfloat16 at least, and waits for the device once. What a step multiplies is counted in `GpuShape.flops`:
  6 x weights x tokens, 12 x layers x width x pairs of tokens for attention, the head for tokens of the loss alone, and
  nothing that is computed twice. The nominal rate is the maker's, without sparsity; the rate that this device reaches
  on matrices of 8,192 is measured in the same run, and the share of it stands beside;
- the head of 32,768 loss tokens at 152,000 words holds 1.5 GB at most on top of weights and hidden states, the
  gradients of both among it;
- a step on one sequence of 32,768 tokens with adapters on Qwen3-8B holds less than 60 GB;
- 64 streams of the 0.6B model go on through swaps of adapters and of whole models, none fails, and the trainer finds
  the logprobs that each turn carries with the version that it names: mean difference at most 0.02 nats, which is what
  bfloat16 rounds, and at least ten times that by another version.

Exit status 1 when one does not hold, 2 where there is no CUDA device. Steps with adapters, and with sequences of many
lengths, have no line of their own.
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

from benchmarks._gpu_shapes import nominal_tflops

SHARE_MIN = 0.4
HEAD_GB_MAX = 1.5
LARGE_GB_MAX = 60.0
GRADIENTS_MAX = {"float32": 1e-4, "bfloat16": 3e-2}
LOGPROBS_MEAN_MAX, ANOTHER_TIMES_MIN = 0.02, 10.0
CHILD_S_MAX = 300
Found = dict[str, Any]


def child(module: str, *arguments: str) -> Found:
    """What a measurement in a process of its own prints last. What else it says goes to standard error."""
    command = [sys.executable, "-m", f"benchmarks.{module}", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, timeout=CHILD_S_MAX)
    if done.returncode:
        return {"failed": f"{module} ended with status {done.returncode}"}
    found: Found = json.loads(done.stdout.splitlines()[-1])
    return found


def matmul_tflops(size: int = 8192, times: int = 20) -> float:
    """On random numbers: the median of several."""
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


def correct(_: Found, missed: list[str]) -> Found:
    found = child("_gpu_correct")
    for way, of in found.items() if "failed" not in found else ():
        most = GRADIENTS_MAX["float32" if "float32" in way else "bfloat16"]
        if not of["gradients"] <= most:
            missed.append(f"{way}: gradients differ from float64's by {of['gradients']:.2g}, at most {most:g}")
    return found


def with_shares(found: Found, machine: Found) -> Found:
    nominal = machine["nominal_tflops"]
    shares = {"share_of_matmul": round(found["tflops"] / machine["matmul_tflops"], 3)} if "tflops" in found else {}
    return found | shares | ({"share_of_nominal": round(found["tflops"] / nominal, 3)} if nominal and shares else {})


def full(machine: Found, missed: list[str]) -> Found:
    found = with_shares(child("_gpu_step", "--sequences", "64"), machine)
    kind = "share_of_nominal" if machine["nominal_tflops"] else "share_of_matmul"
    if not found.get(kind, 0) >= SHARE_MIN:
        missed.append(f"full training: {kind} is {found.get(kind)}, at least {SHARE_MIN:g}")
    if not found.get("waits", 9) <= 1:
        missed.append(f"full training: the program waited {found.get('waits')} times for the device in a step")
    return found


def lora(machine: Found, _: list[str]) -> Found:
    return with_shares(child("_gpu_step", "--sequences", "64", "--lora", "--steps", "1"), machine)


def mixed(machine: Found, _: list[str]) -> Found:
    return with_shares(child("_gpu_step", "--sequences", "64", "--mixed", "--steps", "1"), machine)


def plain(machine: Found, _: list[str]) -> Found:
    """As the settings are when nobody changes them."""
    given = ("--sequences", "32", "--plain", "--weights", "float32", "--pack-tokens", "4096", "--steps", "1")
    return with_shares(child("_gpu_step", *given), machine)


def head(_: Found, missed: list[str]) -> Found:
    found = {name: child("_gpu_head", *given) for name, given in (("compiled", ()), ("plain", ("--plain",)))}
    for name, one in found.items():
        if not one.get("peak_gb", 9e9) <= HEAD_GB_MAX:
            missed.append(f"head, {name}: {one.get('peak_gb')} GB, at most {HEAD_GB_MAX:g}")
    return found


def large(machine: Found, missed: list[str]) -> Found:
    given = ("--shape", "8b", "--lora", "--length", "32768", "--sequences", "1", "--recompute", "--steps", "0")
    found = with_shares(child("_gpu_step", *given), machine)
    if not found.get("reserved_gb", 9e9) < LARGE_GB_MAX:
        missed.append(f"Qwen3-8B, adapters, 32,768 tokens: {found.get('reserved_gb')} GB, less than {LARGE_GB_MAX:g}")
    return found


def engine(_: Found, missed: list[str]) -> Found:
    found = child("_gpu_engine")
    if "failed" in found and "turns" not in found:
        missed.append(f"engine: {found['failed']}")
        return found
    if found["failed"]:
        missed.append(f"engine: {found['failed']} requests failed: {found['failures']}")
    for kind, one in found["trainer"].items():
        if not one["mean"] <= LOGPROBS_MEAN_MAX:
            missed.append(f"engine, {kind}: logprobs differ by {one['mean']:.2g} nats, at most {LOGPROBS_MEAN_MAX:g}")
        if not one["another_version_mean"] >= ANOTHER_TIMES_MIN * one["mean"]:
            missed.append(f"engine, {kind}: another version's logprobs are as near: {one['another_version_mean']:.2g}")
    return found


MEASURED: dict[str, Callable[[Found, list[str]], Found]] = {
    one.__name__: one for one in (full, engine, head, large, lora, correct, mixed, plain)
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=MEASURED, default=[*MEASURED])
    parser.add_argument("--out", type=Path, default=Path("reports/bench-gpu.json"))
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device: torch sees none, and nothing here can be measured without", file=sys.stderr)
        return 2
    device = torch.cuda.get_device_name()
    rates = {"matmul_tflops": round(matmul_tflops(), 1), "nominal_tflops": nominal_tflops(device)}
    machine: Found = {"device": device, "torch": torch.__version__, **rates}
    report: Found = {"machine": machine}
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
