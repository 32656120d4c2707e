"""Tests of settings files and of other text files that users write.

`deploy/headrace.toml` matches the settings of the services. Values survive a round trip through TOML. Services accept
each environment variable of the command. Text files are UTF-8 with or without a byte order mark; other encodings are
refused.
"""

from __future__ import annotations

import ast
import codecs
import json
import math
import random
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, date, datetime
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer.main

from headrace.hello_agents import AgenticRLPipeline
from headrace_cli.app import app
from headrace_cli.demo import recipe as demo_recipe
from headrace_gateway.access.keys import _read_file as read_keys
from headrace_inference.vllm_engine import orphans
from headrace_integrations.practice.data_sets import rows_of
from headrace_judge import agreement, rubric
from headrace_operations.accelerate_yaml import settings_of_accelerate
from headrace_operations.controls.runner import from_file
from headrace_operations.evaluation import tasks
from headrace_operations.jobs import recipe as job_recipe
from headrace_operations.jobs.sources import RowFile
from headrace_operations.settings_reference import as_toml
from headrace_operations.supervisor.overrides import key, toml
from headrace_operations.supervisor.plan import installed
from headrace_operations.trinity_yaml import read as read_trinity
from headrace_runtime.main import Service
from headrace_runtime.settings.reference import SettingDoc, describe
from headrace_runtime.settings.sections import Common, ServiceSettings, complete, load
from headrace_runtime.settings.table import read as read_settings
from headrace_schemas.values.text import decode_text
from tests.support.presence import draw_seed
from trinity_bench import settings as bench

CONFIG = Path(__file__).parents[3] / "deploy" / "headrace.toml"
NEEDED = {
    "HEADRACE_JUDGE__ENDPOINT__BASE_URL": "http://127.0.0.1:8000/v1",
    "HEADRACE_JUDGE__ENDPOINT__MODEL": "judge",
    "HEADRACE_TRAINER__BASE": "models/base",
}
"""Settings that a service needs to start."""


def service(name: str) -> Service[Any]:
    definition: Service[Any] = import_module(f"{installed()[name].module}.__main__").SERVICE
    return definition


def described(model: type, prefix: str = "") -> list[SettingDoc]:
    return [SettingDoc.model_validate(doc.model_dump()) for doc in describe(model, prefix)]


def uncommented(text: str) -> str:
    """Return the text with every commented default uncommented. Settings without a default stay comments."""
    return re.sub(r"^#(?=\w+ = (?!\.\.\.$))", "", text, flags=re.MULTILINE)


def test_the_common_settings_are_all_there() -> None:
    assert as_toml({"common": described(Common)}, only="common") in CONFIG.read_text(), (
        "regenerate: headrace config reference -o deploy/headrace.toml"
    )


@pytest.mark.parametrize("name", installed())
def test_a_services_settings_are_all_there(name: str) -> None:
    expected = as_toml({name: described(complete(service(name).settings), f"{name}.")}, only=name)
    assert expected in CONFIG.read_text(), "regenerate: headrace config reference -o deploy/headrace.toml"


@pytest.mark.parametrize("name", installed())
@pytest.mark.parametrize("change", [str, uncommented])
def test_the_file_has_the_defaults(name: str, change: Any, tmp_path: Path) -> None:
    path = tmp_path / "headrace.toml"
    path.write_text(change(CONFIG.read_text()))
    model = service(name).settings
    from_file, defaults = (
        [section.model_dump() for section in load(name, model, source, NEEDED)] for source in (path, None)
    )
    assert from_file == defaults


def test_uncommenting_uncomments() -> None:
    text = '[a]\n# Words = not a setting\n#x = 1\n#y = ...\n#z = {"k" = [1, "#"]}\n'
    assert uncommented(text) == '[a]\n# Words = not a setting\nx = 1\n#y = ...\nz = {"k" = [1, "#"]}\n'


def test_values_as_toml() -> None:
    import tomllib

    value = {"a b": [1, 2.5, True, 'q"\\ü\n'], "c": {"d": "e"}}
    assert tomllib.loads(f"v = {toml(value)}")["v"] == value


def read(value: object) -> object:
    return tomllib.loads(f"value = {toml(value)}")["value"]


VALUES: tuple[object, ...] = (
    True, 0, -7, 2**62, 0.1, 1e300, 1e-7, math.inf, -math.inf, "", "plain", 'a "quoted" \\ path', "tab\tand\nline",
    "DEL \x7f and \x00 and \x1f", "é 日本 😀", [], [1, [2.5, "x"]], {}, {"a": 1, "*": 2.0, "a b": {"ü": ["\x7f"]}},
    date(2026, 1, 2), datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
)  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_value_is_read_back(value: object) -> None:
    assert read(value) == value


def test_not_a_number_is_read_back() -> None:
    assert math.isnan(float(str(read(math.nan))))
    assert toml([math.nan, math.inf]) == "[nan, inf]"


def test_every_character_is_read_back() -> None:
    for start in range(0, 0x11000, 256):
        text = "".join(map(chr, (code for code in range(start, start + 256) if not 0xD800 <= code < 0xE000)))
        assert read(text) == text


def test_random_texts_are_read_back() -> None:
    draw = random.Random(draw_seed())
    for _ in range(500):
        text = "".join(
            chr(draw.choice([draw.randrange(0x20), 0x7F, 0x22, 0x5C, draw.randrange(0x80)])) for _ in range(8)
        )
        assert read({text: [text]}) == {text: [text]}


def test_a_path_is_its_text_and_a_key_is_quoted_where_it_has_to_be() -> None:
    assert toml(Path("models/base")) == '"models/base"'
    assert [key(name) for name in ("port", "a-b_1", "*", "a b", "")] == ["port", "a-b_1", '"*"', '"a b"', '""']


def test_values_without_a_toml_form_are_refused() -> None:
    for value in (None, [None], {"a": object()}):
        with pytest.raises(TypeError, match="TOML has no"):
            toml(value)


def variables(command: Any) -> Iterator[str]:
    for parameter in command.params:
        named = parameter.envvar or ()
        yield from (named,) if isinstance(named, str) else named
    for inner in getattr(command, "commands", {}).values():
        yield from variables(inner)


VARIABLES = sorted({*variables(typer.main.get_command(app)), orphans.VARIABLE})


def test_there_are_some() -> None:
    assert {"HEADRACE_CONFIG", "HEADRACE_DATA_DIR", "HEADRACE_WHO"} <= set(VARIABLES)


@pytest.mark.parametrize("variable", VARIABLES)
def test_no_service_refuses_it(variable: str) -> None:
    common, _ = load("gateway", ServiceSettings, None, {variable: "somebody"})
    assert isinstance(common, Common)


ROOT = Path(__file__).parents[3]
RUBRIC = """
name = "tone"
question = "Is it \u00e9l\u00e9gant?"
[[criteria]]
name = "tone"
question = "Is it \u00e9l\u00e9gant?"
"""
ROW = {"question": "Qui a \u00e9crit?", "answer": "M\u00fcller", "prompt": "p", "completion": "c"}
KEY = f'[[keys]]\nname = "m\u00fcller"\nsha256 = "{"a" * 64}"\n'
RATED = {"human": {"tone": 4}, "judge": {"tone": 4}, "note": "\u00e9"}
PIPELINE = {"model": {"base_model": "\u00e9"}, "sft": {}, "grpo": {}, "eval": {}}
Read = Callable[[Path], object]
LINES = "\n".join([json.dumps(ROW, ensure_ascii=False)] * 2) + "\n"
READERS: dict[str, tuple[str, Read]] = {
    "settings.toml": ('data_dir = "\u00e9"\n', lambda path: read_settings(path, {})),
    "keys.toml": (KEY, read_keys),
    "job.toml": ('# \u00e9\nname = "x"\n', job_recipe.read),
    "demo.toml": ('# \u00e9\nname = "x"\n', lambda path: demo_recipe.read(path.parent)),
    "rubric.toml": (RUBRIC, lambda path: rubric.load(str(path))),
    "scores.jsonl": (json.dumps(RATED, ensure_ascii=False) + "\n", agreement.read),
    "rows.jsonl": (LINES, lambda path: [_strict(row) for _, row in RowFile(path).rows()]),
    "rows.json": (json.dumps([ROW], ensure_ascii=False), lambda path: list(RowFile(path).rows())),
    "tasks.jsonl": (LINES.splitlines()[0] + "\n", tasks.read),
    "data.jsonl": (LINES, lambda path: rows_of(SimpleNamespace(path=path, split="train", name=None))),
    "data.json": (
        json.dumps([ROW], ensure_ascii=False),
        lambda path: rows_of(SimpleNamespace(path=path, split="train", name=None)),
    ),
    "pipeline.json": (
        json.dumps(PIPELINE, ensure_ascii=False), lambda path: AgenticRLPipeline(str(path), SimpleNamespace()).config  # type: ignore[arg-type]
    ),
    "trinity.yaml": ("model:\n  model_path: \u00e9\n", read_trinity),
    "accelerate.yaml": ("num_processes: 2 # \u00e9\n", settings_of_accelerate),
    "recorded.jsonl": (json.dumps({"problem": "\u00e9"}, ensure_ascii=False) + "\n", from_file),
    "bench.toml": ('# \u00e9\ncommand = ["x"]\n', bench.read),
    "bench.jsonl": (LINES.splitlines()[0] + "\n", lambda path: bench.rows(path, "question", "row")),
}  # fmt: skip
"""Name and text of a file, and its reader. Texts hold letters that Latin-1 and UTF-8 write differently."""
ENCODINGS: dict[str, tuple[Callable[[str], bytes], str]] = {
    "utf-16-le": (lambda text: codecs.BOM_UTF16_LE + text.encode("utf-16-le"), "is in UTF-16; save it as UTF-8"),
    "utf-16-be": (lambda text: codecs.BOM_UTF16_BE + text.encode("utf-16-be"), "is in UTF-16; save it as UTF-8"),
    "utf-16 without a mark": (lambda text: text.encode("utf-16-le"), "is in UTF-16; save it as UTF-8"),
    "latin-1": (lambda text: text.encode("latin-1"), "is not in UTF-8 (byte 0x"),
}


def _strict(row: Mapping[str, Any] | Exception) -> Mapping[str, Any]:
    if isinstance(row, Exception):
        raise row
    return row


def outcome(read: Read, path: Path) -> str:
    """Return the value that `read` returns for `path`, or the text of its error."""
    try:
        return f"value {read(path)!r}"
    except Exception as error:  # noqa: BLE001 (each reader has its own kind of error)
        return f"error {error}"


@pytest.mark.parametrize("name", READERS)
def test_a_byte_order_mark_changes_nothing(name: str, tmp_path: Path) -> None:
    text, read = READERS[name]
    path = tmp_path / name
    path.write_bytes(text.encode())
    plain = outcome(read, path)
    assert "UTF" not in plain
    for content in (codecs.BOM_UTF8 + text.encode(), codecs.BOM_UTF8 + text.replace("\n", "\r\n").encode()):
        path.write_bytes(content)
        assert outcome(read, path) == plain


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("name", READERS)
def test_another_encoding_is_named_in_one_sentence(name: str, encoding: str, tmp_path: Path) -> None:
    text, read = READERS[name]
    encode, words = ENCODINGS[encoding]
    path = tmp_path / name
    path.write_bytes(encode(text))
    result = outcome(read, path)
    assert result.startswith("error ")
    assert words in result, result
    assert result.count("UTF-8") <= 2
    assert "\n" not in result
    assert result.isprintable()


def test_the_line_of_a_wrong_byte_is_counted() -> None:
    with pytest.raises(ValueError, match=r"byte 0xe9 in line 12"):
        decode_text(b"a\nb\n\xe9", line=10)


OWN = {
    "packages/operations/src/headrace_operations/replay/runner.py",
    "packages/cli/src/headrace_cli/demo/demo_run.py",
    "services/trainer/src/headrace_trainer/ray_learner/rank.py",
    "services/trainer/src/headrace_trainer/trinity_learner/disk.py",
    "services/trainer/src/headrace_trainer/torch_learner/model/sequence_bound.py",
    "services/trainer/src/headrace_trainer/torch_learner/version_files.py",
    "packages/runtime/src/headrace_runtime/storage/disk.py",
    "packages/runtime/src/headrace_runtime/process/liveness.py",
    "packages/runtime/src/headrace_runtime/kafka/topics.py",
    "schemas/src/headrace_schemas/http/stack_access.py", "schemas/src/headrace_schemas/generate.py",
}  # fmt: skip
"""Modules that decode by themselves: files that Headrace or the kernel wrote."""


def test_files_of_users_are_decoded_in_one_place() -> None:
    decoding_modules = set()
    for folder in ("gateway", "packages", "schemas", "services"):
        for path in (ROOT / folder).rglob("src/**/*.py"):
            source = path.read_text(encoding="utf-8")
            if "read_text(" not in source and "encoding=" not in source:
                continue
            for node in ast.walk(ast.parse(source)):
                if isinstance(node, ast.Call) and _decodes(node):
                    decoding_modules.add(path.relative_to(ROOT).as_posix())
    assert decoding_modules - OWN == set(), "read them with headrace_schemas.values.text.read_user_text"
    assert OWN - decoding_modules == set(), "these decode nothing any more"


def _decodes(call: ast.Call) -> bool:
    """Return whether `call` decodes a file: `read_text`, or `open` in text mode for reading."""
    function = call.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    if name == "read_text":
        return True
    modes = [
        argument.value
        for argument in call.args
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
    ]
    named = {keyword.arg for keyword in call.keywords}
    return name == "open" and "encoding" in named and not any(set(mode) & set("wxab") for mode in modes)
