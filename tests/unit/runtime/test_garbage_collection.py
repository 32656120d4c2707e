"""Garbage collection of a service: imports are exempt, and new objects are collected rarely."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

PROGRAM = """
import gc, json, resource, weakref
from headrace_runtime.main import GARBAGE_THRESHOLD, tune_garbage_collection

class Cycle:
    def __init__(self):
        self.me = self
        self.payload = bytearray(256)

passes = []
gc.callbacks.append(lambda phase, info: passes.append(info["generation"]) if phase == "start" else None)

def work(rounds):
    passes.clear()
    for _ in range(rounds):
        Cycle()
    return len(passes)

untuned = work(500_000)
imported = len(gc.get_objects())
tune_garbage_collection(GARBAGE_THRESHOLD)
left = len(gc.get_objects())
tuned = work(500_000)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
work(2_000_000)
growth = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak
last = weakref.ref(Cycle())
gc.collect()
print(json.dumps([untuned, tuned, imported, left, growth, last() is None]))
"""


def test_service_collects_seldom_and_keeps_its_memory_bounded_through_two_million_cycles() -> None:
    output = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM)], check=True, capture_output=True, text=True
    ).stdout
    untuned, tuned, imported, left, growth_kib, collected = json.loads(output)
    assert tuned * 20 < untuned, "collections for the same work"
    assert left * 20 < imported, "objects that a collection looks at"
    assert growth_kib < 64 * 1024, "garbage waits for the threshold and no longer"
    assert collected
