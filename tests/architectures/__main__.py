"""`python -m tests.architectures` starts the trainer on each architecture and writes reports/architectures.json.

Exit status 1: one was neither equal to its own eager attention nor refused, could not be built, or stands otherwise in
docs/models.md. `--write` puts the table there.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from pathlib import Path

import torch
import transformers
from transformers.utils import logging

from headrace_cli.progress import ProgressDisplay
from tests.architectures import page
from tests.architectures.catalog import CATALOG
from tests.architectures.trial import Trial, play


def main() -> int:
    arguments = _arguments()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    began = time.process_time()
    trials: list[Trial] = []
    broken: list[str] = []
    with ProgressDisplay("test-architectures", len(CATALOG), unit="architectures") as progress:
        for done, architecture in enumerate(CATALOG):
            progress.at(done, doing=architecture.name)
            try:
                trial = play(architecture)
            except Exception as error:  # noqa: BLE001 - one that cannot be tried must not hide the others
                traceback.print_exc()
                broken.append(f"{architecture.name}: {type(error).__name__}: {error}")
                continue
            trials.append(trial)
            print(page.table([trial]).splitlines()[-1], flush=True)
            broken += [f"{trial.name}: silent with {kind}" for kind, one in trial.outcomes.items() if not one.spoken]
    if arguments.write:
        page.write(trials)
    if page.verdicts(page.written()) != page.verdicts(page.table(trials)):
        broken.append("docs/models.md says otherwise: python -m tests.architectures --write")
    cpu_s = round(time.process_time() - began, 1)
    report = {
        "held": not broken,
        "broken": broken,
        "cpu_s": cpu_s,
        "transformers": transformers.__version__,
        "architectures": [trial.model_dump() for trial in trials],
    }
    arguments.report.parent.mkdir(parents=True, exist_ok=True)
    arguments.report.write_text(json.dumps(report, indent=2) + "\n")
    print(f"{len(trials)} architectures in {cpu_s} s of CPU", *(broken or ["every line held"]), sep="\n", flush=True)
    return 1 if broken else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", type=Path, default=Path("reports/architectures.json"))
    parser.add_argument("--write", action="store_true", help="write the table to docs/models.md")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
