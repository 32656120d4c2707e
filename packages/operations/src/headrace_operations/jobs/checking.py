"""Checking and tokenizing of a job's rows. The result file, `jobs/<lineage>.rows`, is replaced atomically.

Rows that repeat a held-out task of the gate or of a file are refused, because training on them would inflate its score.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Annotated, Any

from pydantic import Field, ValidationError

from headrace.errors import UsageError
from headrace_operations.jobs.checks import CheckReport, DuplicateDetector, PreviewRow, Refusal, check
from headrace_operations.jobs.formats import RowReader
from headrace_operations.jobs.job import PreparedJob
from headrace_operations.jobs.sources import BadRow, DataRow, RowFile
from headrace_operations.replay.pipeline import run_together
from headrace_operations.replay.program import Program, start_program
from headrace_runtime.process.parent_death import parent_bound_command
from headrace_runtime.process.programs import program_environment
from headrace_schemas.programs import (
    BaseLine,
    OpenedLine,
    RefusedLine,
    RowLine,
    Tasks,
    WrittenBranch,
    WrittenLine,
)
from headrace_schemas.values.base import Finite, Model, Sha256

_SERVICE = "inference"
_FILTER = "written"
_TICK = 50
Tick = Callable[[str, int, int], None]


class CheckedRow(Model):
    """A row that passed the checks, with its tokens: one line of the file of checked rows."""

    file: Sha256
    row: Annotated[int, Field(ge=1)]
    label: bool | None = None
    reward: Finite | None = None
    prompt: Sha256
    """Digest of the prompt."""
    answers: tuple[tuple[WrittenBranch, ...], ...]


class RowChecker:
    """One pass over the rows of a job, which checks and tokenizes them.

    Args:
        prepared: the job.
        tick: callback that gets the progress.
        target: file to write the checked rows to, or None.
        preview: number of first rows that the report shows with their token texts.
    """

    def __init__(self, prepared: PreparedJob, tick: Tick, target: Path | None = None, preview: int = 0) -> None:
        self._prepared = prepared
        self._tick = tick
        self._target = target
        self._preview = preview
        self._options = prepared.job.rows
        self._reader = RowReader(self._options.columns, self._options.form, self._options.ignored)
        self._pending: dict[int, tuple[RowFile, int, DataRow]] = {}
        self._total_bytes = sum(file.size_bytes for file in prepared.files)
        self.report = CheckReport()

    async def run(self) -> CheckReport:
        """Check all rows.

        Raises:
            UsageError: a file cannot be read.
            HeadraceError: the tokenizer program failed.
        """
        held_out = self._load_held_out_tasks()
        self.report.held_out = len(held_out)
        draft = self._target.with_name(f".{self._target.name}.draft") if self._target else None
        with ExitStack() as stack:
            output: IO[bytes] | None = None
            if draft is not None:
                draft.parent.mkdir(parents=True, exist_ok=True)
                output = stack.enter_context(draft.open("wb"))
            async with start_program(_SERVICE, self._prepared.overrides.environ, _FILTER) as program:
                await run_together(self._feed(program, held_out), self._drain(program, output))
        if draft is not None and self._target is not None:
            draft.replace(self._target)
        return self.report

    async def _open(self, program: Program) -> None:
        bound = self._prepared.overrides.get("trainer.memory.sequence_tokens")
        line = BaseLine(folder=str(self._prepared.base), tokens_max=bound)
        await program.feed("base", line.model_dump_json().encode())

    async def _feed(self, program: Program, held_out: HeldOutTasks) -> None:
        await self._open(program)
        repeats = DuplicateDetector(allowed=self._options.keep_duplicates)
        for number, (file, row_number, record) in enumerate(self._numbered_rows(), 1):
            self.report.rows += 1
            try:
                row = self._parse(record, f"{file.path.name}, row {row_number}", repeats, held_out)
            except BadRow as error:
                self.report.refuse(Refusal(file.path.name, row_number, error.kind, str(error)))
                continue
            self._pending[number] = file, row_number, row
            has_preview = self.report.rows <= self._preview
            line = RowLine(
                number=number,
                prompt=row.prompt,
                answers=row.answers,
                tools=row.tools,
                untrained=row.untrained,
                shown=has_preview,
            )
            await program.feed("row", line.model_dump_json(exclude_none=True).encode())
        program.close()

    def _parse(
        self, record: dict[str, object] | BadRow, location: str, repeats: DuplicateDetector, held_out: HeldOutTasks
    ) -> DataRow:
        if isinstance(record, BadRow):
            raise record
        row = self._reader.read(record)
        self.report.unread.update(self._reader.unread(record))
        check(row)
        held_out.check(row)
        repeats.check(row, location)
        return row

    def _numbered_rows(self) -> Iterator[tuple[RowFile, int, dict[str, object] | BadRow]]:
        for file in self._prepared.files:
            for row_number, record in file.rows():
                yield file, row_number, record

    async def _drain(self, program: Program, output: IO[bytes] | None) -> None:
        answered = -1
        async for word, value in program.lines():
            answered += 1
            if word == "opened":
                self.report.tokens_max = OpenedLine.model_validate_json(value).tokens_max
            elif word == "refused":
                self._add_refusal(RefusedLine.model_validate_json(value))
            else:
                self._add_checked_row(WrittenLine.model_validate_json(value), output)
            if answered % _TICK == 0:
                self._tick("checking rows", answered, 0)
        self._tick("checking rows", answered, answered)

    def _add_refusal(self, line: RefusedLine) -> None:
        file, row_number, _ = self._pending.pop(line.number)
        self.report.refuse(Refusal(file.path.name, row_number, line.kind, line.reason))

    def _add_checked_row(self, line: WrittenLine, output: IO[bytes] | None) -> None:
        file, row_number, row = self._pending.pop(line.number)
        self.report.accept(line.answers)
        if any(branch.texts for branches in line.answers for branch in branches):
            self.report.shown.append(PreviewRow(file.path.name, row_number, line.answers))
        if output is not None:
            answers = tuple(
                tuple(branch.model_copy(update={"texts": ()}) for branch in branches) for branches in line.answers
            )
            checked = CheckedRow(
                file=file.sha256,
                row=row_number,
                label=row.label,
                reward=row.reward,
                prompt=row.prompt_digest,
                answers=answers,
            )
            output.write(checked.model_dump_json(exclude_none=True).encode() + b"\n")

    def _load_held_out_tasks(self) -> HeldOutTasks:
        tasks = read_task_texts(self._options.held_out)
        overrides = self._prepared.overrides
        command = overrides.get("registry.gate.command")
        if command and self._options.gate_tasks:
            url = str(overrides.get("registry.gate.base_url") or "http://127.0.0.1:8000/v1")
            variables = overrides.get("registry.gate.environment") or ()
            tasks |= list_gate_tasks(command, url, program_environment(variables, environ=overrides.environ))
        return HeldOutTasks(tasks)


class CheckedRows:
    """File of checked rows with random access. Only the offsets of the lines are in memory."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._starts: list[int] = []
        at = 0
        with path.open("rb") as file:
            for line in file:
                self._starts.append(at)
                at += len(line)

    def __len__(self) -> int:
        return len(self._starts)

    def read(self, positions: Iterator[int]) -> Iterator[tuple[int, CheckedRow]]:
        """Yield the rows at `positions` of the file, each with its position."""
        with self._path.open("rb") as file:
            for position in positions:
                file.seek(self._starts[position])
                yield position, CheckedRow.model_validate_json(file.readline())


SHINGLE_WORDS = 13
"""Number of consecutive words that count as a leak (arXiv:2005.14165, appendix C)."""
_WORDS_MIN = 4
"""Shorter tasks leak only through a message that consists of the task alone."""
_WORD = re.compile(r"\w+")
_TASK_COLUMNS = ("task", "question", "prompt", "instruction", "input", "messages")
_GATE_S_MAX = 60.0


class HeldOutTasks:
    """Names of held-out tasks by their text. A row leaks a task if a user message contains the task's text or a part of
    it.

    A part is a shingle: a sequence of words of a fixed length.
    """

    def __init__(self, tasks: Mapping[str, str]) -> None:
        self._texts_by_words: dict[tuple[str, ...], str] = {}
        self._texts_by_shingle: dict[tuple[str, ...], str] = {}
        for name, text in tasks.items():
            words = _words(text)
            if words:
                self._texts_by_words.setdefault(words, name)
                length = min(len(words), SHINGLE_WORDS)
                if length >= _WORDS_MIN:
                    for shingle in _shingles(words, length):
                        self._texts_by_shingle.setdefault(shingle, name)
        self._lengths = sorted({len(shingle) for shingle in self._texts_by_shingle})

    def __len__(self) -> int:
        return len(self._texts_by_words)

    def check(self, row: DataRow) -> None:
        """Check that no user message of a training row contains a task that is held out for evaluation.

        Raises:
            BadRow: a message contains such a task; the error names the task.
        """
        first = [*row.prompt, *row.answers[0]]
        for message in (message for message in first if message.role == "user"):
            name = self._find_task(_words(message.text))
            if name is not None:
                raise BadRow("held_out", f"a user message contains the held-out task {_quote(name)}")

    def _find_task(self, words: tuple[str, ...]) -> str | None:
        if words in self._texts_by_words:
            return self._texts_by_words[words]
        shingles = (shingle for length in self._lengths for shingle in _shingles(words, length))
        return next(
            (self._texts_by_shingle[shingle] for shingle in shingles if shingle in self._texts_by_shingle), None
        )


def read_task_texts(paths: Iterable[Path]) -> dict[str, str]:
    """Return the user messages of the tasks in files of rows, by the name of the task (`FILE:ROW`).

    Raises:
        UsageError: a row is invalid or has no task column.
    """
    texts_by_name: dict[str, str] = {}
    for path in paths:
        for number, row in RowFile(path).rows():
            if isinstance(row, BadRow):
                raise UsageError(f"{path}, row {number}: {row}")
            texts = list(_texts(row))
            if not texts:
                columns = ", ".join(_TASK_COLUMNS)
                raise UsageError(f"{path}, row {number}: a task must have one of the columns {columns}")
            texts_by_name |= {f"{path.name}:{number}": text for text in texts}
    return texts_by_name


def list_gate_tasks(command: Iterable[str], base_url: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Run the gate program until it has printed its tasks, and return their names.

    Args:
        command: `registry.gate.command`.
        base_url: value for the placeholder `{base_url}`.
        environ: environment of the program.

    Raises:
        UsageError: the program prints no tasks.
    """
    arguments = [part.replace("{base_url}", base_url).replace("{python}", sys.executable) for part in command]
    try:
        result = subprocess.run(
            parent_bound_command(arguments), stdin=subprocess.DEVNULL, capture_output=True, env=dict(environ),
            timeout=_GATE_S_MAX, check=False,
        )  # fmt: skip
        tasks = Tasks.model_validate_json(result.stdout.split(b"\n", 1)[0])
    except (OSError, subprocess.TimeoutExpired, ValidationError) as error:
        problem = f"no tasks within {_GATE_S_MAX:g} s" if isinstance(error, subprocess.TimeoutExpired) else "no tasks"
        raise UsageError(
            f"registry.gate.command = {arguments}: the program prints {problem}, so leaks cannot be detected; "
            "fix it (check with `headrace config check`), or skip its tasks with --no-gate-tasks"
        ) from None
    return {name: name for name in (*tasks.gate, *tasks.audit)}


def _texts(row: Mapping[str, Any]) -> Iterator[str]:
    value = next((row[name] for name in _TASK_COLUMNS if row.get(name)), None)
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        messages = (entry for entry in value if isinstance(entry, dict))
        yield from (str(message.get("content")) for message in messages if message.get("role") == "user")


def _words(text: str) -> tuple[str, ...]:
    return tuple(_WORD.findall(text.casefold()))


def _shingles(words: tuple[str, ...], length: int) -> Iterator[tuple[str, ...]]:
    return (words[at : at + length] for at in range(len(words) - length + 1))


def _quote(name: str) -> str:
    return json.dumps(name if len(name) <= 60 else f"{name[:60]}…", ensure_ascii=False)
