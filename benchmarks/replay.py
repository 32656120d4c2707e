"""Trajectories per second that a replay gets through: `python -m benchmarks.replay`.

Fills an embedded broker with trajectories, their experiences and feedback, then measures what `headrace replay` does
before training begins, which is bound by the model: experiences copied, trajectories scored again with a reward
function. 2,000 a second are wanted of both. On a machine that others use, time says little; so the report has the CPU
time of the command and its programs (the broker's apart), and the rate at which one core decodes the same trajectories,
which shrinks as the others do. Some minutes. Writes `reports/bench-replay.json`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import resource
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

from headrace.producing import Outgoing, producing
from headrace.topics import Range
from headrace_cli.progress import ProgressDisplay
from headrace_cli.replay import copying, runner
from headrace_cli.replay.journal import Journal
from headrace_cli.replay.partition_merge import opened
from headrace_cli.replay.report import Report
from headrace_cli.replay.request import Request, make
from headrace_cli.supervisor.overrides import Overrides
from headrace_runtime import topics
from headrace_runtime.settings import BusSettings
from headrace_schemas import Branch, Dialogue, Experience, Feedback, Message, Span, Trajectory
from headrace_schemas.ids import session_key
from tests.support.broker_process import BrokerProcess

RATE_WANTED = 2_000
TOKENS, TURNS, SAMPLED = 320, 3, 24
DECODED = 2_000
START = datetime(2026, 1, 1, tzinfo=UTC)
REWARD = """
def answer(trajectory, context):
    return float(context["expected"] in trajectory.final_answer)
"""


def trajectory(number: int) -> Trajectory:
    """Three turns, 320 tokens, every fourth one answered as expected."""
    draw = random.Random(number)
    turn_ids = [f"chatcmpl-{number}-{turn}" for turn in range(TURNS)]
    spans = tuple(
        Span(
            start=80 + 100 * turn - SAMPLED,
            logprobs=tuple(-draw.random() for _ in range(SAMPLED)),
            turn_id=turn_ids[turn],
            version="bench@0123456789abcdef",
        )
        for turn in range(TURNS)
    )
    answer = "it is 42" if number % 4 == 0 else "I cannot tell"
    said = [("user", f"How many mails did sender {number % 97} send?"), ("assistant", "search"), ("tool", "3 results")]
    messages = tuple(Message.model_validate({"role": role, "content": text}) for role, text in said)
    return Trajectory(
        time=START + timedelta(seconds=number),
        trajectory_id=f"t{number}",
        session_key=session_key("default", f"s{number}"),
        session_id=f"s{number}",
        task_id=f"task-{number % 50}",
        run_id=str(number),
        model="bench",
        branches=(Branch(token_ids=tuple(draw.randrange(300) for _ in range(TOKENS)), spans=spans),),
        dialogues=(Dialogue(messages=(*messages, Message(role="assistant", content=answer))),),
        end_reason="end_call",
        started_at=START + timedelta(seconds=number - 3),
        context={"expected": "42"},
    )


def experience(of: Trajectory, number: int) -> Experience:
    return Experience(
        time=of.time,
        experience_id=Experience.id_of(of.trajectory_id, 0),
        trajectory_id=of.trajectory_id,
        session_key=of.session_key,
        session_id=of.session_id,
        task_id=of.task_id,
        run_id=of.run_id,
        model=of.model,
        branch=of.branches[0],
        turn_ids=of.branches[0].turn_ids,
        reward=float(number % 4 == 0),
    )


def events(number: int) -> Iterator[Trajectory | Experience | Feedback]:
    made = trajectory(number)
    yield made
    yield experience(made, number)
    if number % 10 == 0:
        yield Feedback(
            time=made.time, feedback_id=f"f{number}", session_key=made.session_key, value=1.0,
            msg_ids=made.branches[0].turn_ids,
        )  # fmt: skip


@asynccontextmanager
async def stored(folder: Path, count: int, progress: ProgressDisplay) -> AsyncIterator[str]:
    """A broker that holds so many trajectories and all that belongs to them."""
    broker = BrokerProcess(folder / "broker")
    await asyncio.to_thread(broker.start)
    try:
        await topics.ensure(BusSettings(address=broker.address))
        async with producing(broker.address) as producer:
            for first in range(0, count, 200):
                numbers = range(first, min(first + 200, count))
                await producer.send([Outgoing.of(one, "bench") for number in numbers for one in events(number)])
                progress.at(numbers.stop, count, "storing")
        yield broker.address
    finally:
        await asyncio.to_thread(broker.stop)


def request(bus: str, folder: Path, lineage: str, *, rescored: bool) -> Request:
    """As `headrace replay run` makes it."""
    (folder / "rewards.py").write_text(REWARD, encoding="utf-8")
    (folder / "base").mkdir(exist_ok=True)
    (folder / "base" / "config.json").write_text('{"vocab_size": 320, "max_position_embeddings": 2048}', "utf-8")
    settings = {
        "data_dir": folder / "data",
        "trainer.model": "bench",
        "trainer.base": folder / "base",
        "trainer.max_staleness": 10_000_000,
        "scorer.functions": [f"{folder / 'rewards.py'}:answer"],
    }
    topic = Trajectory.topic if rescored else Experience.topic
    return make(lineage, Range(topic), Overrides(None, settings, os.environ), bus)


async def copied(wanted: Request, progress: ProgressDisplay) -> tuple[Report, float, float]:
    """The first half of a replay, up to where training would begin; its seconds, and those of CPU that it took."""

    def tick(what: str, done: int, total: int) -> None:
        progress.at(done, total or None, what)

    report = Report(wanted.lineage, wanted.of, wanted.wanted.topic)
    began, busy = time.perf_counter(), cpu_s()
    async with opened(wanted.bus, wanted.wanted) as merge:
        await copying.create(wanted.bus, wanted.lineage)
        await runner.copy(wanted, report, merge, Journal((), (), "nothing was trained"), tick)
    return report, time.perf_counter() - began, cpu_s() - busy


def cpu_s() -> float:
    """Of this process and of all that it has started and that has ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def decoding_rate() -> float:
    """Trajectories a second that one core turns from bytes into events: what this machine can do at best."""
    values = [trajectory(number).to_json() for number in range(DECODED)]
    began = time.perf_counter()
    for value in values:
        Trajectory.from_json(value)
    return DECODED / (time.perf_counter() - began)


async def measure(count: int) -> dict[str, object]:
    with (
        ProgressDisplay("bench-replay", unit="trajectories", estimate=False) as progress,
        tempfile.TemporaryDirectory(prefix="headrace-bench-") as name,
    ):
        folder = Path(name)
        before = decoding_rate()
        began = time.perf_counter()
        async with stored(folder, count, progress) as bus:
            print(f"{count} trajectories stored in {time.perf_counter() - began:.0f} s")
            rates, cpu_ms = {}, {}
            for what, rescored in (("copied", False), ("scored_again", True)):
                wanted = request(bus, folder, what.replace("_", "-"), rescored=rescored)
                report, seconds, busy_s = await copied(wanted, progress)
                assert report.experiences == count, report
                rates[what], cpu_ms[what] = count / seconds, 1000 * busy_s / count
                print(f"{what}: {rates[what]:,.0f} a second")
        decoded = (before + decoding_rate()) / 2
    return {
        "trajectories": count,
        "tokens_per_trajectory": TOKENS,
        "json_bytes_per_trajectory": len(trajectory(0).to_json()),
        "rate_wanted": RATE_WANTED,
        "rates": rates,
        "cpu_ms_per_trajectory": cpu_ms,
        "one_core_decodes": decoded,
        "share_of_one_core_decoding": {what: rate / decoded for what, rate in rates.items()},
        "reached": all(rate >= RATE_WANTED for rate in rates.values()),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=100_000)
    parser.add_argument("--out", type=Path, default=Path("reports/bench-replay.json"))
    options = parser.parse_args()
    found = asyncio.run(measure(options.trajectories))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(found, indent=1))
    return 0 if found["reached"] else 1


if __name__ == "__main__":
    sys.exit(main())
