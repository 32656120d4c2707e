"""Offline training jobs of a stack: rows become a version of its model, which the registry then probes and gates."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from headrace.blocking import blocking
from headrace.errors import UsageError
from headrace.sessions import new_id
from headrace_integrations.stack.connection import Stack
from headrace_schemas.values.plain_values import plain_json


def train_rows(
    stack: Stack,
    kind: str,
    rows: Iterable[Mapping[str, Any]],
    *,
    epochs: int = 1,
    settings: Mapping[str, object] | None = None,
    timeout_s: float = 600.0,
) -> str:
    """Train on rows, offer the version to the registry, and return the version once the registry has decided.

    Args:
        kind: algorithm of the job, for example `sft` or `dpo`.
        rows: rows with the columns of a data set (docs/guides/offline-training.md).

    Raises:
        UsageError: rows or settings are invalid.
        HeadraceError: the job failed.
    """
    if stack.data_dir is None:
        raise UsageError(
            "data_dir: an offline job needs it; attach to the data directory of `headrace up`, or use `headrace train`"
        )
    from headrace_operations import jobs

    trainer_settings = stack.settings()
    job_settings = {"trainer.model": stack.model, **(settings or {})}
    with tempfile.TemporaryDirectory(prefix="headrace-rows-") as folder:
        path = Path(folder) / "rows.jsonl"
        path.write_text(
            "".join(f"{json.dumps(plain_json(row), ensure_ascii=False)}\n" for row in rows), encoding="utf-8"
        )
        job = jobs.Job(
            kind=kind,
            source=path,
            base=trainer_settings["trainer.base"],
            lineage=f"{kind}-{new_id()[-12:]}",
            settings=job_settings,
            epochs=epochs,
            bus=stack.bus,
            data_dir=stack.data_dir,
            offer=True,
        )
        with ThreadPoolExecutor(1, thread_name_prefix="headrace-job") as thread:  # the caller may have an event loop
            version = thread.submit(jobs.run, job).result()
    blocking(stack.until_decided(version, timeout_s))
    return version
