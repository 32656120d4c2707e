"""A program's digest changes with each file of its code, and with no other file."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from headrace_runtime.process.programs import program_digest

FILES = {
    "gate.py": "import helper\nfrom parts import scoring\nimport json, late.one\n",
    "helper.py": "def play():\n    from deep.down import well\n    return well\n",
    "parts/__init__.py": "from . import shared\n",
    "parts/scoring.py": "from .shared import unit\nfrom ..outside import nothing\n",
    "parts/shared.py": "unit = 1\n",
    "deep/down.py": "well = 1\n",
    "late/one.py": "broken = (\n",
    "entry/__init__.py": "",
    "entry/__main__.py": "import helper\n",
}
BESIDE = {"other.py": "x = 1\n", "tasks.jsonl": "{}\n", "parts/unused.py": "", "out.log": "a\n"}
SCRIPT = ("{python}", "gate.py", "--tasks", "tasks.jsonl", "--log", "out.log")
MODULE = ("{python}", "-m", "entry")
COVERED = {
    SCRIPT: {name for name in FILES if not name.startswith("entry")},
    MODULE: {"entry/__init__.py", "entry/__main__.py", "helper.py", "deep/down.py"},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in {**FILES, **BESIDE}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize("command", COVERED, ids=["script", "module"])
@pytest.mark.parametrize("name", [*FILES, *BESIDE])
@pytest.mark.parametrize("change", ["edit", "remove"])
def test_a_digest_covers_the_code_and_nothing_else(
    folder: Path, command: tuple[str, ...], name: str, change: str
) -> None:
    before = program_digest(command, folder)
    assert program_digest(command, folder) == before
    if change == "edit":
        (folder / name).write_text((folder / name).read_text() + "# more\n")
    else:
        (folder / name).unlink()
    assert (program_digest(command, folder) != before) is (name in COVERED[command])


def test_a_digest_does_not_depend_on_where_the_folder_lies(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = tmp_path_factory.mktemp("other")
    for name, text in FILES.items():
        (other / name).parent.mkdir(exist_ok=True)
        (other / name).write_text(text)
    assert program_digest(SCRIPT, folder) == program_digest(SCRIPT, other)
    assert program_digest((*SCRIPT, "more"), folder) != program_digest(SCRIPT, folder)


@pytest.mark.parametrize("command", [(), ("./gate",), ("python", "-m", "json.tool"), ("python", "-m"), ("a\x00.py",)])
def test_a_command_without_code_here_has_the_digest_of_its_words(tmp_path: Path, command: tuple[str, ...]) -> None:
    words = hashlib.sha256(json.dumps(list(command)).encode()).hexdigest()
    assert program_digest(command, tmp_path) == words


def test_a_program_that_imports_itself_or_much_ends(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("import b\nimport a\n")
    (tmp_path / "b.py").write_text("import a\n" + "".join(f"import m{n}\n" for n in range(1_500)))
    for number in range(1_500):
        (tmp_path / f"m{number}.py").write_text("")
    assert program_digest(("a.py",), tmp_path)
