"""Stand-in for `trinity run --config FILE` without a GPU, with the same files and the same faults.

It reads the newest rows first, and only a full batch; it marks them as read before it trains them; it treats any
exception as an end, saves its state under the number that it had already counted up to, and exits with 0.
`STAND_IN_DIES` names a point at which it dies once, and `STAND_IN_DIED` the file that records the death.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import signal
import sqlite3
import struct
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from safetensors.numpy import load, load_file, save_file

POINTS = ("at_start", "before_read", "after_read", "raised", "half_saved", "unsaid", "said")
_RATE, _MOMENTUM = 1e-2, 0.9


class Job:
    """One configuration's."""

    def __init__(self, path: Path) -> None:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
        self.folder = Path(config["checkpoint_root_dir"], config["project"], config["name"])
        buffer = config["buffer"]["trainer_input"]["experience_buffer"]
        self.size = config["buffer"]["train_batch_size"]
        self.table = buffer["name"]
        self.database = buffer["path"].removeprefix("sqlite:///")
        self.model = Path(config["model"]["model_path"])
        self.step = 0
        self.lessons: list[str] = []
        self.momentum = 0.0
        latest = self.folder / "latest_checkpointed_iteration.txt"
        weights = self.model
        if latest.exists():
            self.step = int(latest.read_text())
            weights = self.folder / f"global_step_{self.step}" / "actor" / "huggingface"
            about = json.loads((weights.parent / "optimizer.json").read_text())
            self.momentum, self.lessons = about["momentum"], about["lessons"]
        self.weights = load_file(weights / "model.safetensors")

    def read(self) -> list[dict[str, Any]]:
        """Return a full batch, else an empty list. Returned rows are marked as read."""
        with sqlite3.connect(self.database, timeout=30) as connection:
            try:
                rows = connection.execute(
                    f"select m.id, m.msg_id, m.reward, b.experience_bytes from {self.table} m "
                    f"join {self.table}_blob b on b.id = m.id where m.consumed = 0 order by m.id desc limit ?",
                    (self.size,),
                ).fetchall()
            except sqlite3.OperationalError:  # no such table yet
                return []
            if len(rows) < self.size:
                return []
            marks = ",".join("?" * len(rows))
            connection.execute(
                f"update {self.table} set consumed = consumed + 1 where id in ({marks})", [row[0] for row in rows]
            )
        return [{**parsed(row[3]), "msg_id": row[1]} for row in rows]

    def train(self, rows: Sequence[dict[str, Any]]) -> None:
        self.step += 1
        die("raised")
        for row in sorted(rows, key=lambda entry: entry["msg_id"]):
            tokens = row["tensors"]["tokens"].astype(np.int64)
            signal_of = float((row["tensors"]["advantages"] * row["tensors"]["action_mask"]).sum())
            self.momentum += signal_of * (1 + int(tokens.sum()) % 97)
        for number, name in enumerate(sorted(self.weights)):
            self.weights[name] = self.weights[name] + np.float32(_RATE * self.momentum / (1 + number))
        self.momentum *= _MOMENTUM
        self.lessons.append(rows[0]["msg_id"].rpartition("-")[0])

    def save(self) -> None:
        actor = self.folder / f"global_step_{self.step}" / "actor"
        (actor / "huggingface").mkdir(parents=True, exist_ok=True)
        (actor / "huggingface" / "config.json").write_text("{}")
        die("half_saved")
        save_file(self.weights, actor / "huggingface" / "model.safetensors", metadata={"format": "pt"})
        (actor / "optimizer.json").write_text(json.dumps({"momentum": self.momentum, "lessons": self.lessons}))
        die("unsaid")
        (self.folder / "latest_checkpointed_iteration.txt").write_text(str(self.step))
        die("said")


def parsed(data: bytes) -> dict[str, Any]:
    """Trinity's format, read as its documentation has it."""
    assert data[:4] == b"TRXP"
    version, meta, blob = struct.unpack("<BQQ", data[4:21])
    assert version == 1
    about = pickle.loads(data[21 : 21 + meta])
    assert len(data) == 21 + meta + blob
    tensors = load(data[21 + meta :])
    return {**about["items"][0], "tensors": {name.partition(":")[2]: tensor for name, tensor in tensors.items()}}


def die(point: str) -> None:
    """Die once, at the requested point."""
    died = os.environ.get("STAND_IN_DIED")
    if os.environ.get("STAND_IN_DIES") != point or died is None or Path(died).exists():
        return
    Path(died).write_text(point)
    if point == "raised":
        raise RuntimeError("out of memory")
    os.kill(os.getpid(), signal.SIGKILL)


def main(path: str) -> None:
    die("at_start")
    job = Job(Path(path))
    try:
        while True:
            die("before_read")
            rows = job.read()
            if not rows:
                time.sleep(0.02)
                continue
            die("after_read")
            job.train(rows)
            job.save()
    except Exception as error:  # noqa: BLE001 (as Trinity does)
        print(f"Error in Trainer: {error}")
    job.save()


def digest_of(folder: Path) -> str:
    """Return the weights of a folder, for tests."""
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


if __name__ == "__main__":
    main(sys.argv[-1])
