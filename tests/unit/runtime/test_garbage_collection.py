"""Garbage collection of a service: imports are exempt, and new objects are collected rarely and in short pauses."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

from headrace_collector import __main__ as collector
from headrace_judge import __main__ as judge
from headrace_runtime.main import GARBAGE_THRESHOLD
from headrace_scorer import __main__ as scorer

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


PAUSES = """
import gc, json, sys, time
from headrace_runtime.main import tune_garbage_collection

def longest_pause_s(threshold):
    tune_garbage_collection(threshold)
    began_s, pauses_s = 0.0, [0.0]
    def note(phase, info):
        nonlocal began_s
        if phase == "start":
            began_s = time.thread_time()
        elif info["generation"] == 0:
            pauses_s.append(time.thread_time() - began_s)
    gc.callbacks.append(note)
    messages = [{"role": "user", "parts": [{"text": [str(number)]}]} for number in range(60_000)]
    gc.callbacks.remove(note)
    return max(pauses_s)

print(json.dumps([min(longest_pause_s(threshold) for _ in range(3)) for threshold in map(int, sys.argv[1:])]))
"""


def test_services_that_keep_runs_collect_the_newest_objects_in_short_pauses() -> None:
    stream_services = (collector.SERVICE, scorer.SERVICE, judge.SERVICE)
    thresholds = [str(GARBAGE_THRESHOLD), *{str(service.garbage_threshold) for service in stream_services}]
    output = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PAUSES), *thresholds], check=True, capture_output=True, text=True
    ).stdout
    seldom_s, *often_s = json.loads(output)
    assert max(often_s) * 2 < seldom_s, "pause of a collection"
