"""`docs/glossary.md` names what exists; no class name has two meanings; retired words do not come back."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import pytest

from tests.repo.compose_files import ROOT

TEXT = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| ([\w -]+) \| `(\w+)(?:\.(\w+))?` \| (.+) \|$", TEXT, re.MULTILINE)
RETIRED = dict(re.findall(r"^\| (\w+) \| ([^|`]+) \|$", TEXT.partition("## Words that name nothing")[2], re.MULTILINE))
RETIRED.pop("not", None)

ONE_PACKAGE = ("Account", "Fleet", "Ledger", "Verdict")
"""Parts of class names that once meant different things in different packages. Each may be in one package only."""

SHARED = {
    "ABTestFramework": "two versions on live traffic, as its article calls it, and with the registry's own arguments",
    "Announcer": "publishes the events of its process, in trainer and inference",
    "Answer": "an answer over HTTP to the supervisor, and an answer in a chat",
    "ApiError": "the error object of OpenAI's API, as the gateway sends it and the client receives it",
    "ChatMessage": "a message of OpenAI's chat API, as gateway, engine and judge read or write it",
    "ChatRequest": "the body of OpenAI's chat API, as gateway and engine read it",
    "Completion": "an answer of OpenAI's chat API, as the engine makes it and the judge reads it",
    "Entry": "a key with its value: of a topic, of the trainer's window, of the prefix cache",
    "HotUpdater": "new weights for what serves, as its article calls it, and with the registry's own arguments",
    "Job": "an offline training, and a leased piece of work in a service's database",
    "Mean": "an arithmetic mean with its error, and a running mean",
    "ModelManager": "versions under names, as its article calls it, and with the registry's own arguments",
    "Model": "pydantic's term for a class of values, and the neural network",
    "Outgoing": "a record to be produced, in runtime and client",
    "Place": "a position in a topic, and in a folder",
    "Plan": "what a command is going to do, and how the trainer splits its batches",
    "Program": "another program that is run, and a compiled graph",
    "Record": "a record of a topic",
    "Report": "what a command reports",
    "Request": "what a command was asked to do",
    "RewardFunction": "computes a reward: as the scorer loads it, and as a class to derive from",
    "Row": "a row of a table, and of a batch",
    "Run": "one attempt at a task",
    "Sampling": "how tokens are sampled: as the event has it, and as the engine takes it",
    "Selection": "what was selected: dead letters, and experiences",
    "StreamOptions": "`stream_options` of OpenAI's chat API, as gateway and engine read it",
    "Tail": "the last part: of a log file, and of a model",
    "Topic": "a topic of the bus",
}
"""Class names that several files define, with what they mean there. Remove a line once one file alone defines it."""

Defined = Mapping[str, Sequence[tuple[str, str, set[str]]]]
"""Class name to each class of it: its package, its file, and its fields and methods."""


def _sources() -> Iterable[tuple[str, Path]]:
    """Import package and file of all code of ours."""
    for init in sorted([*ROOT.glob("*/src/*/__init__.py"), *ROOT.glob("services/*/src/*/__init__.py")]):
        yield from ((init.parent.name, path) for path in sorted(init.parent.rglob("*.py")))


def _classes() -> Defined:
    found: dict[str, list[tuple[str, str, set[str]]]] = defaultdict(list)
    for package, path in _sources():
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                names = {
                    one.target.id
                    for one in node.body
                    if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
                }
                names |= {one.name for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)}
                found[node.name].append((package, str(path.relative_to(ROOT)), names))
    return found


CLASSES = _classes()
STEMS = sorted({(package, path.stem) for package, path in _sources()})


def second_meanings(classes: Defined) -> list[str]:
    """Each public class name that several files define without being listed in `SHARED`, and each word of
    `ONE_PACKAGE` in the class names of several packages."""
    problems = [
        f"{name} is defined in {', '.join(path for _, path, _ in defined)}; rename all but one of them"
        for name, defined in sorted(classes.items())
        if len(defined) > 1 and not name.startswith("_") and name not in SHARED
    ]
    for word in ONE_PACKAGE:
        packages = {package for name, defined in classes.items() if word in _parts(name) for package, *_ in defined}
        if len(packages) > 1:
            problems.append(f"{word} names classes in {', '.join(sorted(packages))}; one package may use it")
    return problems


def retired(names: Iterable[str]) -> list[str]:
    """Class names and file names that hold a retired word."""
    found = [(name, {part.lower() for part in _parts(name)}) for name in names]
    return [
        f"{name}: say {instead} instead of {word}"
        for name, parts in found
        for word, instead in RETIRED.items()
        if not parts.isdisjoint({word, f"{word}s"})
    ]


def _parts(name: str) -> list[str]:
    """The words of a name in CamelCase or snake_case; a plural counts as its singular."""
    parts = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+", name)
    return [*parts, *(part.removesuffix("s") for part in parts)]


def test_no_word_is_listed_twice() -> None:
    words = [word for word, *_ in ROWS]
    assert len(words) > 60
    assert len(set(words)) == len(words)
    assert not set(words) & set(RETIRED), "a retired word is not in the glossary"


@pytest.mark.parametrize(("word", "name", "member"), [row[:3] for row in ROWS], ids=[row[0] for row in ROWS])
def test_a_word_is_what_the_code_calls_it(word: str, name: str, member: str) -> None:
    defined = [one for one in CLASSES[name] if name not in SHARED or member in one[2]] if name in CLASSES else []
    packages = {package for package, *_ in defined}
    assert len(packages) == 1, f"{word}: {name} is defined in {[path for _, path, _ in defined] or 'no file'}"
    assert not member or member in defined[0][2], f"{word}: {name} has no {member}"


def test_no_class_name_has_two_meanings() -> None:
    assert second_meanings(CLASSES) == []


def test_what_is_listed_as_shared_is_shared() -> None:
    assert [name for name in SHARED if len(CLASSES.get(name, ())) < 2] == [], "remove it from SHARED"


def test_retired_words_do_not_come_back() -> None:
    assert len(RETIRED) > 5
    assert retired([*CLASSES, *(stem for _, stem in STEMS)]) == []


def test_a_planted_second_meaning_is_caught() -> None:
    again = {**CLASSES, "Trajectory": [*CLASSES["Trajectory"], ("headrace_broker", "broker/paths.py", set[str]())]}
    assert any(problem.startswith("Trajectory is defined in") for problem in second_meanings(again))
    verdict = {**CLASSES, "GateVerdict": [("headrace_registry", "registry/gate.py", set[str]())]}
    assert second_meanings(verdict) == [
        "Verdict names classes in headrace_judge, headrace_registry; one package may use it"
    ]
    assert retired(["Rehearsal", "said_about", "ReplicaSet"]) == [
        "Rehearsal: say dry run instead of rehearsal",
        "said_about: say feedback set (scorer), request metadata (gateway) instead of said",
    ]
