"""Options of a CPU's libraries, and the check that products are not rounded."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from headrace_trainer.torch_learner.model import cpu

SETTINGS: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
FAULTS = """
import resource, sys, torch
from headrace_trainer.torch_learner.model import cpu
if sys.argv[1] == "kept":
    assert cpu.keep_memory()
faults = []
for _ in range(4):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    first, second = torch.zeros(8_000_000), torch.zeros(40_000_000)
    del first, second
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(min(faults[1:]))
"""

HELD = """
import torch
from headrace_trainer.torch_learner.model import cpu, sequence_bound

def held_mb():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) // 1024 for line in status if line.startswith("VmRSS"))

assert cpu.keep_memory()
before = held_mb()
several = [torch.ones(5_000_000) for _ in range(20)]
last = torch.ones(1000)
del several
kept = held_mb() - before
sequence_bound.free_bytes(torch.device("cpu"))
print(kept, held_mb() - before)
"""


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    before = SETTINGS.fp32_precision
    yield
    SETTINGS.fp32_precision = before


def test_products_are_exact_with_whatever_makes_them() -> None:
    cpu.multiply_directly()
    left, right = torch.randn(300, 70), torch.randn(70, 90)
    exact = left.double() @ right.double()
    assert float((left @ right - exact).abs().max()) < 1e-4


@pytest.mark.parametrize("product", ["bmm", "addmm"])
def test_who_rounds_is_not_asked(monkeypatch: pytest.MonkeyPatch, product: str) -> None:
    """A CPU with units for bfloat16 rounds one of its products; `exact` must notice it."""
    original = getattr(torch, product)

    def rounded(*tensors: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = original(*(tensor.bfloat16().float() for tensor in tensors))
        return result

    SETTINGS.fp32_precision = "none"
    monkeypatch.setattr(torch, product, rounded)
    assert not cpu.exact()
    assert not cpu.multiply_directly()
    assert SETTINGS.fp32_precision == "none"


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc can be asked to keep memory")
def test_freed_memory_stays() -> None:
    def faults(how: str) -> int:
        process = subprocess.run(
            [sys.executable, "-c", FAULTS, how], capture_output=True, text=True, check=True, timeout=60
        )
        return int(process.stdout.splitlines()[-1])

    assert faults("kept") < 100
    assert faults("not") > 100, "else this test sees nothing"


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc can be asked to keep memory")
def test_who_asks_what_is_free_has_it_given_back() -> None:
    process = subprocess.run([sys.executable, "-c", HELD], capture_output=True, text=True, check=True, timeout=300)
    kept_mb, left_mb = (int(each) for each in process.stdout.split()[-2:])
    assert kept_mb > 350
    assert left_mb < 100
