"""Offline training beside a stack: rows become a version of its model, which the registry then probes and gates."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from headrace.errors import UsageError
from headrace.practice.blocking import blocking
from headrace.sessions import new_id
from headrace.stack.connection import Stack, support
from headrace_schemas.plain_values import plain_json


def train_rows(
    stack: Stack,
    kind: str,
    rows: Iterable[Mapping[str, Any]],
    *,
    epochs: int = 1,
    settings: Mapping[str, object] | None = None,
    timeout_s: float = 600.0,
) -> str:
    """Train rows with the algorithm `kind` (`sft`, `dpo`, ...), offer the version, and return it when the registry has
    decided. `rows` have the columns of a data set (docs/guides/offline-training.md).

    Raises `UsageError` for rows or settings that cannot be used, `HeadraceError` for what fails.
    """
    if stack.data_dir is None:
        raise UsageError(
            "an offline job needs the data directory: attach to that of `headrace up`, or use `headrace train`"
        )
    jobs = support("headrace_cli.jobs", "headrace-cli")
    known = stack.settings()
    chosen = {"trainer.model": stack.model, **(settings or {})}
    with tempfile.TemporaryDirectory(prefix="headrace-rows-") as folder:
        path = Path(folder) / "rows.jsonl"
        path.write_text(
            "".join(f"{json.dumps(plain_json(row), ensure_ascii=False)}\n" for row in rows), encoding="utf-8"
        )
        job = jobs.Job(
            kind=kind,
            source=path,
            base=known["trainer.base"],
            lineage=f"{kind}-{new_id()[-12:]}",
            settings=chosen,
            epochs=epochs,
            bus=stack.bus,
            data_dir=stack.data_dir,
            offer=True,
        )
        with ThreadPoolExecutor(1, thread_name_prefix="headrace-job") as thread:  # the caller may have an event loop
            version: str = thread.submit(jobs.run, job).result()
    blocking(stack.until_decided(version, timeout_s))
    return version
