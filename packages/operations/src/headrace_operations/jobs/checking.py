"""Checking and tokenizing of the rows of a job. The result, `jobs/<lineage>.rows`, is replaced as a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Annotated

from pydantic import Field

from headrace_operations.jobs.checks import CheckReport, DuplicateDetector, PreviewRow, Refusal, check
from headrace_operations.jobs.formats import RowReader
from headrace_operations.jobs.held_out import HeldOutTasks, list_gate_tasks, read_task_texts
from headrace_operations.jobs.job import PreparedJob
from headrace_operations.jobs.sources import BadRow, DataRow, RowFile
from headrace_operations.replay.pipeline import run_together
from headrace_operations.replay.program import Program, start_program
from headrace_runtime.process.programs import program_environment
from headrace_schemas.programs.models import BaseLine, OpenedLine, RefusedLine, RowLine, WrittenBranch, WrittenLine
from headrace_schemas.values.base import Finite, Model, Sha256

_SERVICE = "inference"
_FILTER = "written"
_TICK = 50
Tick = Callable[[str, int, int], None]


class CheckedRow(Model):
    """A row that can be trained with its tokens; one line of the file of checked rows."""

    file: Sha256
    row: Annotated[int, Field(ge=1)]
    label: bool | None = None
    reward: Finite | None = None
    prompt: Sha256
    """Digest of the prompt."""
    answers: tuple[tuple[WrittenBranch, ...], ...]


class RowChecker:
    """One pass over the rows of a job.

    Args:
        prepared: the job.
        tick: reports the progress.
        target: file of the checked rows; None writes none.
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
        self.report.keep(line.answers)
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
        """Yield the rows at `positions` together with their positions."""
        with self._path.open("rb") as file:
            for position in positions:
                file.seek(self._starts[position])
                yield position, CheckedRow.model_validate_json(file.readline())
