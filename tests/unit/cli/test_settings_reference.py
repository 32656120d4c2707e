"""`deploy/headrace.toml` matches the settings of the services, and the services read it.

Values written as TOML are equal after they are read with the parser of the settings.

Services accept every environment variable of the command when the same shell starts them.
"""

from __future__ import annotations

import math
import random
import re
import tomllib
from collections.abc import Iterator
from datetime import UTC, date, datetime
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import typer.main

from headrace_cli.app import app
from headrace_inference.vllm_engine import orphans
from headrace_operations.settings_reference import as_toml
from headrace_operations.supervisor.plan import installed
from headrace_operations.toml_text import key, toml
from headrace_runtime.main import Service
from headrace_runtime.settings.reference import SettingDoc, describe
from headrace_runtime.settings.sections import Common, ServiceSettings, complete, load

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
    """Return the file with every default uncommented; settings without a default stay comments."""
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
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    draw = random.Random(seed)
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
