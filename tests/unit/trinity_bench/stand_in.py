"""Stand-in for the Python of Trinity's environment: it runs `-c CODE`, starts Ray's head, or runs `trinity run` of a
bench.

Its exit status is 0 whatever has happened, as with Trinity. `STAND_IN` selects the behaviour of the bench.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path


def main(arguments: list[str]) -> None:
    if arguments[0] == "-c":
        return
    if "ray" in arguments[1]:
        if os.environ.get("STAND_IN") == "no ray":
            sys.exit("Exception: the port is taken")
        assert len(Path(os.environ["RAY_AUTH_TOKEN_PATH"]).read_text()) == 64
        print("Ray runtime started.", flush=True)
        time.sleep(600)
    bench(json.loads(Path(arguments[-1]).read_text()), os.environ.get("STAND_IN", ""))


def bench(config: dict[str, object], how: str) -> None:
    """Write the scores of a bench, which depend on version, row and seed, or fail as `how` describes."""
    [taskset] = config["buffer"]["explorer_input"]["eval_tasksets"]  # type: ignore[index]
    arguments = taskset["workflow_args"]["headrace_bench"]
    if how == "silent":
        print("ValueError: Invalid configuration: Key 'promt_key' not in 'FormatConfig'")
        return
    if how == "hangs":
        time.sleep(600)
    lines = (Path(taskset["path"]) / "train.jsonl").read_text().splitlines()
    for number, line in enumerate(lines):
        play_line = json.loads(line)
        play, row = json.loads(play_line["play"]), json.loads(play_line["row"])
        assert play["version"] == config["model"]["model_path"]  # type: ignore[index]
        assert os.environ["OPENAI_API_KEY"] == "sk-secret"
        outcome: dict[str, object] = {"score": row["worth"] + play["seed"] / 100 + play["version"].endswith("f") / 2}
        if how == "fails" and number == 1:
            outcome = {"error": "APIConnectionError: nobody listens"}
        with Path(arguments["results"]).open("a") as file:
            file.write(json.dumps({"play": play, **outcome}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
