"""Tests of the tools of tests: servers that no test leaves running, and mutants that the tests must detect."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from headrace_schemas import EVENTS
from tests.attack.route_inputs import KnownTurns, http_input, record_headers, topic_inputs
from tests.mutants import program
from tests.mutants.program import Planted, Waiting, planted
from tests.mutants.trial import ROOT, CoveringTests, Mutant, split, try_mutant
from tests.support import presence, processes
from tests.support.processes import alive, naming, wait_until
from tests.support.servers import KafkaNode, missing_postgres

INNER = """
import os, subprocess, sys, threading, time, pathlib, pytest

def test_something({fixtures}, tmp_path):
    started = []
    def in_a_thread():  # whose end must end nothing
        command = [sys.executable, "-c", "import os, time; os.fork() or os.setsid(); time.sleep(600)"]
        started.append(subprocess.Popen(command, start_new_session=True))
    thread = threading.Thread(target=in_a_thread)
    thread.start()
    thread.join()
    time.sleep(0.5)
    assert started[0].poll() is None
    told = pathlib.Path({told!r})
    (tmp_path / "folder").write_text({folder})
    (tmp_path / "folder").rename(told)
    {then}
"""
LIMITS = "gateway/src/headrace_gateway/access/limits.py"
TESTS = ("tests/unit/gateway/test_access.py",)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere there is no /proc to find them in")
@pytest.mark.parametrize(
    ("then", "status"),
    [("time.sleep(600)", -9), ("while told.exists(): time.sleep(0.05)", 0)],
    ids=["killed", "forgotten"],
)
def test_nothing_remains(tmp_path: Path, then: str, status: int) -> None:
    fixtures = ["embedded_bus", *([] if missing_postgres() else ["postgres"])]
    started_file = tmp_path / "told"
    folder = "str(postgres.folder)" if "postgres" in fixtures else "''"
    inner_test = INNER.format(fixtures=", ".join(fixtures), told=str(started_file), folder=folder, then=then)
    (tmp_path / "test_inner.py").write_text(inner_test)
    name = f"RUN_OF_{tmp_path.name}"  # finds them here, and is not what the reaper looks for
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.conftest"]
    inner = subprocess.Popen(
        [*command, "-c", os.devnull, "--rootdir", str(tmp_path), str(tmp_path / "test_inner.py")],
        cwd=ROOT,
        env={**os.environ, name: "1", "PYTEST_DEBUG_TEMPROOT": str(tmp_path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until(lambda: started_file.exists() or inner.poll() is not None, 90, "the inner test runs")
        assert started_file.exists(), f"the inner test ended with {inner.poll()}"
        servers = " ".join(naming(name).values())
        assert "headrace_broker" in servers
        assert ("postgres" in fixtures) == ("initdb" in servers or "postgres" in servers)
        folder = started_file.read_text()
        assert folder == "" or Path(folder).is_dir()
        started_file.unlink()
        if status:
            inner.kill()
        assert inner.wait(60) == status
        wait_until(lambda: not [pid for pid in naming(name) if alive(pid)], 30, "no process remains")
        wait_until(lambda: not (folder and Path(folder).exists()), 30, "no folder remains")
    finally:
        inner.kill()


_FEW = (31_000, 31_020)


@pytest.fixture
def few_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_RANGE", _FEW)
    monkeypatch.setattr(processes, "_assigned", set())


def as_worker(monkeypatch: pytest.MonkeyPatch, worker: int, workers: int) -> None:
    monkeypatch.setenv("PYTEST_XDIST_WORKER", f"gw{worker}")
    monkeypatch.setenv("PYTEST_XDIST_WORKER_COUNT", str(workers))


@pytest.mark.usefixtures("few_ports")
def test_no_port_is_given_twice_by_any_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    assigned: list[int] = []
    for worker in (0, 1):
        as_worker(monkeypatch, worker, 2)
        assigned += [processes.free_port() for _ in range(7)]
    assert len(assigned) == len(set(assigned))
    assert all(_FEW[0] <= port < _FEW[1] for port in assigned)


@pytest.mark.usefixtures("few_ports")
def test_a_seed_that_a_test_sets_makes_no_ports() -> None:
    drawn = []
    for _ in range(5):
        random.seed(0)
        drawn.append(processes.free_port())
        processes._assigned.clear()
    assert len(set(drawn)) > 1, "once in 160,000 runs they are equal by chance"


@pytest.mark.kafka
@pytest.mark.usefixtures("few_ports")
def test_a_server_that_cannot_begin_says_why(tmp_path: Path) -> None:
    """In CI, Kafka failed to format its folder, and the reason was lost."""
    presence.need("kafka")
    node = KafkaNode(tmp_path)
    node._controller_port = node.port
    with pytest.raises(AssertionError, match="two listeners on the same port"):
        node._format()


@pytest.mark.parametrize("fault", planted(), ids=lambda fault: fault.name)
def test_each_fault_can_still_be_planted(fault: Planted) -> None:
    assert fault.stale is None


def test_every_module_and_test_that_is_named_is_there() -> None:
    for group in program.groups():
        missing = [path for path in (*group.files, *group.tests) if not (ROOT / path).exists()]
        assert not missing
    assert all(survivor.reason for survivor in program.survivors())


@pytest.mark.parametrize(("old", "new", "outcome"), [("burst", "burst", "survived"), ("429", "430", "killed")])
def test_a_mutant_dies_and_the_original_lives(old: str, new: str, outcome: str) -> None:
    text = (ROOT / LIMITS).read_text(encoding="utf-8").replace(old, new)
    verdict = try_mutant(Mutant("try", LIMITS, text, TESTS), 300)
    assert verdict.outcome == outcome, verdict.output


@pytest.mark.long
@pytest.mark.parametrize("fault", random.Random(7).sample(planted(), 2), ids=lambda fault: fault.name)
def test_a_sample_of_the_planted_faults_is_noticed(fault: Planted) -> None:
    """`make check NAME=mutants` tries all injected faults."""
    verdict = try_mutant(fault.mutant(), 300)
    assert verdict.outcome == "killed", verdict.output


def test_a_worker_is_given_mutants_of_its_own_place_alone() -> None:
    """Another worker may have taken the last mutant between two checks."""
    mutants = [Mutant(str(number), file, "", TESTS) for number, file in enumerate(("a.py", "a.py", "b.py"))]
    waiting = Waiting(mutants)
    assert waiting.take() == mutants[0]
    assert waiting.take(("b.py", TESTS)) is None
    assert waiting.take(mutants[0].target) == mutants[1]
    assert waiting.take(mutants[0].target) is None
    assert len(waiting) == 1
    assert (waiting.take(), waiting.take()) == (mutants[2], None)


def test_a_file_is_overlaid_with_its_whole_import_package() -> None:
    package, inside = split("services/inference/src/headrace_inference/chat/plain.py")
    assert (package.name, str(inside)) == ("headrace_inference", "chat/plain.py")


def test_tests_that_run_a_changed_statement_come_first_the_shortest_before() -> None:
    text = "def f(x):\n    if x:\n        return (\n            1\n        )\n    return 2\n"
    recorded = json.dumps({"slow": (2.0, [1, 2, 3, 4]), "fast": (1.0, [1, 2, 4]), "other": (0.1, [1, 2, 6])})
    by_line = CoveringTests(text, recorded)
    assert by_line.covering(text.replace("            1", "            3")) == ["fast", "slow"]
    assert by_line.covering(text.replace("return 2", "return 3")) == ["other"]
    assert by_line.covering(text.replace("if x", "if not x")) == ["other", "fast", "slow"]
    assert by_line.covering(text) == []
    assert by_line.covering("X = 1\n" + text) == ["other", "fast", "slow"]


def test_attacks_draw_inputs_for_every_route_and_topic() -> None:
    rng = random.Random(presence.draw_seed())
    names = tuple(f"chatcmpl-{number}" for number in range(80))
    turns = KnownTurns("tiny", "tiny@1", names, ("session", "another"), "chatcmpl-of-another")
    inputs = [http_input(turns, rng, chat=chat) for chat in (True, False) for _ in range(200)]
    assert {sent.method for sent in inputs} == {"GET", "POST"}
    assert topic_inputs().keys() == EVENTS.keys()
    assert all(record_headers(topic, rng) and examples for topic, examples in topic_inputs().items())
