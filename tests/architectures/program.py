"""The trainer on each architecture: equal to the model's own eager attention, or refused.

One architecture through the trainer's start, once with each packing: equal to native eager, or refused.

The table of docs/models.md, made of `reports/architectures.json`.
"""

from __future__ import annotations

import argparse
import re
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
import transformers
from pydantic import BaseModel
from transformers.utils import logging

from headrace_runtime.errors import SettingError
from headrace_runtime.storage.model_folder import find_folder_problems
from headrace_trainer.settings import TrainerSettings
from tests.architectures.catalog import CATALOG, Architecture
from tests.system.program import Line, Program, Run, equals, no_problems

PACKINGS: tuple[Literal["blocks", "padded"], ...] = ("blocks", "padded")


class Outcome(BaseModel):
    """`difference` in nats where logprobs were compared; `refused` is the start's sentence where it refuses."""

    difference: float | None = None
    tokens: int = 0
    refused: str | None = None

    @property
    def spoken(self) -> bool:
        """Equal within the bound, or refused by the name of a setting."""
        return self.refused is not None or self.difference is not None


class Trial(BaseModel):
    """A line of `reports/architectures.json`."""

    name: str
    model_type: str
    outcomes: dict[str, Outcome]


def try_architecture(architecture: Architecture) -> Trial:
    """Build it, and start to train it."""
    with tempfile.TemporaryDirectory(prefix="architecture-") as folder:
        base = architecture.build(Path(folder))
        outcomes = {packing: _outcome(base, packing) for packing in PACKINGS}
    return Trial(name=architecture.name, model_type=architecture.model_type, outcomes=outcomes)


def _problems_as_saved(architecture: Architecture) -> list[str]:
    """Problems that the check finds in folders as transformers saves them, with a head of their own and without."""
    problems: list[str] = []
    for tied in (False, True):
        with tempfile.TemporaryDirectory(prefix="architecture-") as folder:
            case = replace(architecture, settings={**architecture.settings, "tie_word_embeddings": tied})
            problems += find_folder_problems(case.build(Path(folder)))
    return problems


def _outcome(base: Path, packing: Literal["blocks", "padded"]) -> Outcome:
    from headrace_trainer.torch_learner.native import compare_base  # torch, which the page's own test does without

    settings = TrainerSettings.model_validate({"base": str(base), "compute": {"packing": packing, "device": "cpu"}})
    try:
        outcome = compare_base(settings)
    except SettingError as error:
        return Outcome(refused=str(error).replace(str(base), "models/base"))
    assert not outcome.unseen, outcome
    return Outcome(difference=outcome.difference, tokens=outcome.tokens)


PAGE = Path(__file__).resolve().parents[2] / "docs/models.md"
BEGIN = "<!-- architectures: of reports/architectures.json, `make check NAME=architectures` -->\n"
END = "<!-- end of architectures -->"
_HEAD = f"| architecture | `model_type` | {' | '.join(f'`{packing}`' for packing in PACKINGS)} |\n|---|---|---|---|\n"


def table(trials: Sequence[Trial]) -> str:
    """A line for each."""
    lines = (f"| {trial.name} | `{trial.model_type}` | {' | '.join(_cells(trial))} |" for trial in trials)
    return _HEAD + "".join(f"{line}\n" for line in lines)


def written() -> str:
    """The table as the page has it."""
    return PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]


def write(trials: Sequence[Trial]) -> None:
    """Put the table where the old one stands."""
    before, begin, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(f"{before}{begin}{table(trials)}{END}{rest.partition(END)[2]}", encoding="utf-8")


def verdicts(text: str) -> dict[str, str]:
    """Cells of the table by name, without its figures, which differ a little from machine to machine. Where rounding
    alone comes near the bound, so does the verdict.
    """
    lines = [line for line in text.splitlines()[2:] if line.startswith("| ")]
    lines = [re.sub(r"refused: 0\.00\d+ nats", "equal", line) for line in lines]
    return {line.split(" | ")[0].removeprefix("| "): re.sub(r"[0-9.]+(e-?\d+)? nats", "nats", line) for line in lines}


def _cells(trial: Trial) -> list[str]:
    return [_cell(trial.outcomes[packing]) for packing in PACKINGS]


def _cell(outcome: Outcome) -> str:
    if outcome.refused is None:
        return "equal"
    differs = re.search(r"by ([0-9.e-]+ nats)", outcome.refused)
    return f"refused: {differs[1]}" if differs else "refused: attention of its own"


def play(run: Run) -> None:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    began_s = time.process_time()
    trials: list[Trial] = []
    with run.progress(len(CATALOG), "architectures") as progress:
        for number, architecture in enumerate(CATALOG):
            progress.update(number, activity=architecture.name)
            try:
                trial = try_architecture(architecture)
            except Exception as error:  # noqa: BLE001 - an architecture that cannot be built must not hide the others
                traceback.print_exc()
                run.add(Line(architecture.name, f"{type(error).__name__}: {error}", "can be built", holds=False))
                continue
            trials.append(trial)
            print(table([trial]).splitlines()[-1], flush=True)
            silent = [kind for kind, outcome in trial.outcomes.items() if not outcome.spoken]
            run.add(no_problems(f"{trial.name}: neither equal to eager attention nor refused", silent))
            run.add(no_problems(f"{trial.name}: problems of a folder as saved", _problems_as_saved(architecture)))
    if run.options.write:
        write(trials)
    same = verdicts(written()) == verdicts(table(trials))
    run.add(equals("docs/models.md agrees (else: python -m tests.system architectures --write)", same, expected=True))
    run.figures |= {
        "cpu_s": round(time.process_time() - began_s, 1),
        "transformers": transformers.__version__,
        "architectures": [trial.model_dump() for trial in trials],
    }


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--write", action="store_true", help="write the table to docs/models.md")


PROGRAM = Program("Start the trainer on each architecture of transformers.", play, _add_arguments)
