"""A gate whose plays are benches of Trinity-RFT (docs/gate.md):

    python -m trinity_bench.gate --base-url http://127.0.0.1:8000/v1 --trinity .venv-trinity/bin/trinity

It names the tasks of a file, one JSON object a line with `split` and `question`, and plays what each line of its
standard input asks for: all that wait of one version are one bench, as starting one takes Trinity a while. A play
without a score ends it with status 1, so that nobody is judged by a guess. Trinity's workflows draw their own samples:
the seed of a play tells plays of one task apart and does nothing else.
"""

from __future__ import annotations

import argparse
import json
import queue
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trinity_bench.bench import Bench, BenchFailed, trinity_environment
from trinity_bench.ray_node import ray_node

HERE = Path(__file__).parent
_GATHER_S = 0.5
"""How long a bench waits for more plays: the registry asks for several at a time."""
Asked = dict[str, Any]


def serve(bench: Bench, tasks: Sequence[Mapping[str, Any]]) -> None:
    """Until standard input ends. Raises `BenchFailed`."""
    known = {task["question"]: task for task in tasks}
    splits = {split: [task["question"] for task in tasks if task["split"] == split] for split in ("gate", "audit")}
    print(json.dumps(splits), flush=True)
    lines: queue.Queue[str | None] = queue.Queue()
    threading.Thread(target=_read, args=(lines,), daemon=True).start()
    while asked := _waiting(lines):
        for version in dict.fromkeys(one["version"] for one in asked):
            plays = [one for one in asked if one["version"] == version]
            with tempfile.TemporaryDirectory(prefix="trinity-bench-") as folder:
                scores = bench.scores(Path(folder), version, [known[one["task"]] for one in plays])
            for one, score in zip(plays, scores, strict=True):
                print(json.dumps({**one, "score": score}), flush=True)


def _read(lines: queue.Queue[str | None]) -> None:
    for line in sys.stdin:
        lines.put(line)
    lines.put(None)


def _waiting(lines: queue.Queue[str | None]) -> list[Asked]:
    """At least one play, and those that come soon after it; none at the end of standard input."""
    found: list[Asked] = []
    try:
        while (line := lines.get(timeout=_GATHER_S if found else None)) is not None:
            found.append(json.loads(line))
        lines.put(None)  # the end is seen again once these are played
    except queue.Empty:
        pass
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Play held-out tasks with versions, by benches of Trinity-RFT.")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1", help="the gateway's")
    parser.add_argument("--trinity", type=Path, required=True, help="the program `trinity`, in its own environment")
    parser.add_argument("--tasks", type=Path, default=HERE / "tasks.jsonl", help="JSON lines with split and question")
    parser.add_argument("--workflow", default="short_answers", help="a workflow of Trinity's")
    parser.add_argument("--workflows", type=Path, default=HERE / "workflows", help="a folder that announces it")
    parser.add_argument("--cpus", type=int, default=4, help="what Ray may plan with")
    parser.add_argument("--at-once", type=int, default=16, help="plays of a bench that run at a time")
    options = parser.parse_args()
    trinity = options.trinity.absolute()
    tasks = [json.loads(line) for line in options.tasks.read_text(encoding="utf-8").splitlines()]
    try:
        with ray_node(trinity.with_name("ray"), options.cpus, trinity_environment(trinity)) as address:
            bench = Bench(
                trinity,
                options.base_url,
                options.workflow,
                options.workflows.absolute(),
                address,
                at_once=options.at_once,
            )
            serve(bench, tasks)
    except (BenchFailed, TimeoutError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
