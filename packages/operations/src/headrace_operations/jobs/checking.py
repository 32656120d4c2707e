"""Reads, checks and tokenizes the rows of a job. What is left is a file, `jobs/<lineage>.rows`, whole or not there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Annotated

from pydantic import Field

from headrace_operations.jobs.check_report import CheckReport, Refusal, Shown
from headrace_operations.jobs.checks import Repeats, check
from headrace_operations.jobs.formats import RowReader
from headrace_operations.jobs.held_out import HeldOut, tasks_of_files, tasks_of_gate
from headrace_operations.jobs.job import PreparedJob
from headrace_operations.jobs.rows import BadRow, DataRow
from headrace_operations.jobs.sources import RowFile
from headrace_operations.replay.pipeline import side_by_side
from headrace_operations.replay.program import Program, started
from headrace_runtime.program_environment import program_environment
from headrace_schemas.base import Finite, Model, Sha256
from headrace_schemas.written import BaseLine, OpenedLine, RefusedLine, RowLine, WrittenBranch, WrittenLine

_SERVICE = "inference"
_FILTER = "written"
_TICK = 50
Tick = Callable[[str, int, int], None]


class CheckedRow(Model):
    """A row that can be trained, with its tokens: a line of the file."""

    file: Sha256
    row: Annotated[int, Field(ge=1)]
    label: bool | None = None
    reward: Finite | None = None
    prompt: Sha256
    """Of what is asked."""
    answers: tuple[tuple[WrittenBranch, ...], ...]


class Checking:
    """One pass over the rows. `target`: where the lines go; None keeps nothing. The first `preview` rows are shown."""

    def __init__(self, prepared: PreparedJob, tick: Tick, target: Path | None = None, preview: int = 0) -> None:
        self._prepared = prepared
        self._tick = tick
        self._target = target
        self._preview = preview
        self._options = prepared.job.rows
        self._reader = RowReader(self._options.columns, self._options.form, self._options.ignored)
        self._waiting: dict[int, tuple[RowFile, int, DataRow]] = {}
        self._total_bytes = sum(file.size_bytes for file in prepared.files)
        self.report = CheckReport()

    async def run(self) -> CheckReport:
        """Raises `UsageError` for files that cannot be read at all, `HeadraceError` when the program fails."""
        held_out = self._held_out()
        self.report.held_out = len(held_out)
        draft = self._target.with_name(f".{self._target.name}.draft") if self._target else None
        with ExitStack() as stack:
            out: IO[bytes] | None = None
            if draft is not None:
                draft.parent.mkdir(parents=True, exist_ok=True)
                out = stack.enter_context(draft.open("wb"))
            async with started(_SERVICE, self._prepared.overrides.environ, _FILTER) as program:
                await side_by_side(self._feed(program, held_out), self._drain(program, out))
        if draft is not None and self._target is not None:
            draft.replace(self._target)
        return self.report

    async def _open(self, program: Program) -> None:
        bound = self._prepared.overrides.get("trainer.memory.sequence_tokens")
        line = BaseLine(folder=str(self._prepared.base), tokens_max=bound)
        await program.feed("base", line.model_dump_json().encode())

    async def _feed(self, program: Program, held_out: HeldOut) -> None:
        await self._open(program)
        repeats = Repeats(allowed=self._options.keep_duplicates)
        for number, (file, place, found) in enumerate(self._numbered(), 1):
            self.report.rows += 1
            try:
                row = self._checked(found, f"{file.path.name}, row {place}", repeats, held_out)
            except BadRow as error:
                self.report.refuse(Refusal(file.path.name, place, error.kind, str(error)))
                continue
            self._waiting[number] = file, place, row
            shown = self.report.rows <= self._preview
            line = RowLine(
                number=number,
                prompt=row.prompt,
                answers=row.answers,
                tools=row.tools,
                untrained=row.untrained,
                shown=shown,
            )
            await program.feed("row", line.model_dump_json(exclude_none=True).encode())
        program.close()

    def _checked(self, found: dict[str, object] | BadRow, place: str, repeats: Repeats, held_out: HeldOut) -> DataRow:
        if isinstance(found, BadRow):
            raise found
        row = self._reader.read(found)
        self.report.unread.update(self._reader.unread(found))
        check(row)
        held_out.check(row)
        repeats.check(row, place)
        return row

    def _numbered(self) -> Iterator[tuple[RowFile, int, dict[str, object] | BadRow]]:
        for file in self._prepared.files:
            for place, found in file.rows():
                yield file, place, found

    async def _drain(self, program: Program, out: IO[bytes] | None) -> None:
        answered = -1
        async for word, value in program.lines():
            answered += 1
            if word == "opened":
                self.report.tokens_max = OpenedLine.model_validate_json(value).tokens_max
            elif word == "refused":
                self._refused(RefusedLine.model_validate_json(value))
            else:
                self._written(WrittenLine.model_validate_json(value), out)
            if answered % _TICK == 0:
                self._tick("checking rows", answered, 0)
        self._tick("checking rows", answered, answered)

    def _refused(self, line: RefusedLine) -> None:
        file, place, _ = self._waiting.pop(line.number)
        self.report.refuse(Refusal(file.path.name, place, line.kind, line.reason))

    def _written(self, line: WrittenLine, out: IO[bytes] | None) -> None:
        file, place, row = self._waiting.pop(line.number)
        self.report.keep(line.answers)
        if any(branch.texts for branches in line.answers for branch in branches):
            self.report.shown.append(Shown(file.path.name, place, line.answers))
        if out is not None:
            answers = tuple(
                tuple(one.model_copy(update={"texts": ()}) for one in branches) for branches in line.answers
            )
            checked = CheckedRow(
                file=file.sha256,
                row=place,
                label=row.label,
                reward=row.reward,
                prompt=row.prompt_digest,
                answers=answers,
            )
            out.write(checked.model_dump_json(exclude_none=True).encode() + b"\n")

    def _held_out(self) -> HeldOut:
        tasks = tasks_of_files(self._options.held_out)
        overrides = self._prepared.overrides
        command = overrides.get("registry.gate.command")
        if command and self._options.gate_tasks:
            url = str(overrides.get("registry.gate.base_url") or "http://127.0.0.1:8000/v1")
            passed_on = overrides.get("registry.gate.environment") or ()
            tasks |= tasks_of_gate(command, url, program_environment(passed_on, environ=overrides.environ))
        return HeldOut(tasks)


class CheckedRows:
    """The file of rows that can be trained, by their places in it. Holds where each line begins, and nothing else."""

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

    def read(self, order: Iterator[int]) -> Iterator[tuple[int, CheckedRow]]:
        """Rows at these places, with the places."""
        with self._path.open("rb") as file:
            for place in order:
                file.seek(self._starts[place])
                yield place, CheckedRow.model_validate_json(file.readline())
