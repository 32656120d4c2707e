"""Program for Trinity's own Python: `reads.py DATABASE TABLE ROWS YAML OUT`.

It reads our rows with Trinity's own reader, builds its trainer's input of them, and lets Trinity check our YAML. It
writes the results for the comparison in our process, and imports no package of Headrace.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from pathlib import Path
from typing import Any

import numpy as np
from trinity.buffer.reader.sql_reader import SQLReader
from trinity.common.config import StorageConfig, load_config
from trinity.trainer.verl.utils import to_data_proto


async def _read(database: str, table: str, rows: int) -> list[Any]:
    config = StorageConfig(
        name=table,
        storage_type="sql",
        path=f"sqlite:///{database}",
        schema_type="experience",
        batch_size=rows,
        max_read_timeout=5,
        wrap_in_ray=False,
    )
    reader = SQLReader(config)
    experiences: list[Any] = await reader.read()
    try:
        again = len(await reader.read())
    except StopAsyncIteration:
        again = 0
    assert again == 0, "what was read once is there no more"
    return experiences


def main(database: str, table: str, rows: str, yaml: str, out: str) -> None:
    experiences = asyncio.run(_read(database, table, int(rows)))
    arrays, about = {}, []
    for number, experience in enumerate(experiences):
        for name in ("tokens", "logprobs", "advantages", "returns", "action_mask"):
            arrays[f"{number}:{name}"] = getattr(experience, name).numpy()
        about.append(
            {
                "task": experience.eid.task,
                "suffix": experience.eid.suffix,
                "prompt_length": experience.prompt_length,
                "reward": experience.reward,
                "kind": experience.experience_type,
                "version": experience.info["model_version"],
            }
        )
    proto = to_data_proto(experiences, 0, None, logging.getLogger("trinity"))
    arrays["proto:loss"] = proto.batch["response_mask"].numpy()
    arrays["proto:ids"] = proto.batch["responses"].numpy()
    arrays["proto:advantages"] = proto.batch["advantages"].numpy()
    np.savez(Path(out) / "read.npz", **arrays)
    config = load_config(yaml)
    config.check_and_update()
    checked = {
        "mode": config.mode,
        "train_batch_size": config.buffer.train_batch_size,
        "save_interval": config.trainer.save_interval,
        "job": config.checkpoint_job_dir,
        "lr": config.algorithm.optimizer.lr,
    }
    (Path(out) / "read.json").write_text(json.dumps({"rows": about, "config": checked}))


if __name__ == "__main__":
    main(*sys.argv[1:])
