"""Run of `headrace train` to its end, and the logprobs of its weights under transformers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace_operations.jobs.checking import CheckedRow
from headrace_operations.jobs.journal import JobJournal
from headrace_runtime.storage import versions
from headrace_runtime.storage.blobs import BlobStore
from headrace_schemas.programs.models import WrittenBranch

PROGRAM = "from headrace_cli.app import main; main()"
_TIMEOUT_S = 900.0


@dataclass(frozen=True)
class Trained:
    """Result of a lineage in a data directory."""

    data_dir: Path
    lineage: str

    @property
    def journal(self) -> JobJournal:
        journal = JobJournal.read(self.data_dir / "jobs" / f"{self.lineage}.json")
        assert journal is not None
        return journal

    def rows(self) -> list[CheckedRow]:
        lines = (self.data_dir / "jobs" / f"{self.lineage}.rows").read_bytes().splitlines()
        return [CheckedRow.model_validate_json(line) for line in lines]

    def weights(self, folder: Path) -> Path:
        """The last version as a folder."""
        manifest = self.journal.manifest
        assert manifest is not None
        blobs = BlobStore((self.data_dir / "blobs").as_uri())
        return versions.unpack(blobs, versions.read_manifest(blobs, manifest), folder)


def train(folder: Path, *arguments: str) -> None:
    """Run `headrace train ...` in `folder`. Raises `AssertionError` with its output."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    command = [sys.executable, "-c", PROGRAM, "train", *arguments, "--data-dir", "data"]
    process = subprocess.run(
        command, cwd=folder, env=environ, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
    )
    assert process.returncode == 0, f"status {process.returncode}\n{process.stdout[-2000:]}\n{process.stderr[-3000:]}"


def written(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def logprob(folder: Path, branches: Sequence[WrittenBranch]) -> list[float]:
    """Return the mean logprob of each branch's trained tokens, in nats, as transformers computes it."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    means = []
    with torch.no_grad():
        for branch in branches:
            ids = torch.tensor([list(branch.token_ids)])
            logprobs = model(ids).logits[0, :-1].log_softmax(-1)
            positions = [at for span in branch.spans for at in range(span.start, span.start + span.length)]
            means.append(float(sum(logprobs[at - 1, ids[0, at]] for at in positions)))
    return means
