"""The trainer on each architecture: equal to the model's own eager attention, or refused."""

from __future__ import annotations

import argparse
import time
import traceback

import torch
import transformers
from transformers.utils import logging

from tests.architectures import page
from tests.architectures.catalog import CATALOG
from tests.architectures.trial import Trial
from tests.architectures.trial import play as try_architecture
from tests.system.line import Line, equals, no_problems
from tests.system.program import Program, Run


def play(run: Run) -> None:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    began_s = time.process_time()
    trials: list[Trial] = []
    with run.progress(len(CATALOG), "architectures") as progress:
        for number, architecture in enumerate(CATALOG):
            progress.update(number, doing=architecture.name)
            try:
                trial = try_architecture(architecture)
            except Exception as error:  # noqa: BLE001 - an architecture that cannot be built must not hide the others
                traceback.print_exc()
                run.add(Line(architecture.name, f"{type(error).__name__}: {error}", "can be built", holds=False))
                continue
            trials.append(trial)
            print(page.table([trial]).splitlines()[-1], flush=True)
            silent = [kind for kind, outcome in trial.outcomes.items() if not outcome.spoken]
            run.add(no_problems(f"{trial.name}: neither equal to eager attention nor refused", silent))
    if run.options.write:
        page.write(trials)
    same = page.verdicts(page.written()) == page.verdicts(page.table(trials))
    run.add(equals("docs/models.md agrees (else: python -m tests.system architectures --write)", same, expected=True))
    run.figures |= {
        "cpu_s": round(time.process_time() - began_s, 1),
        "transformers": transformers.__version__,
        "architectures": [trial.model_dump() for trial in trials],
    }


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--write", action="store_true", help="write the table to docs/models.md")


PROGRAM = Program("Start the trainer on each architecture of transformers.", play, _add_arguments)
