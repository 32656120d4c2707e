"""The check of a base folder runs without torch and describes each problem in a sentence."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from headrace_runtime.settings.sections import Common
from headrace_trainer.check import check
from headrace_trainer.settings import TrainerSettings
from tests.support import tiny_model


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.build(tmp_path_factory.mktemp("base") / "model")


@pytest.fixture
def base(built: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(built, tmp_path / "model"))


async def problems(base: Path) -> list[str]:
    return await check(Common(), TrainerSettings(base=str(base)))


async def test_a_whole_base_is_fine(base: Path) -> None:
    assert await problems(base) == []


async def test_a_template_inside_the_tokenizers_configuration_is_found(base: Path) -> None:
    template = (base / "chat_template.jinja").read_text()
    (base / "chat_template.jinja").unlink()
    (message,) = await problems(base)
    assert "has no chat template" in message
    config = json.loads((base / "tokenizer_config.json").read_text())
    (base / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    assert await problems(base) == []
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": template}]
    (base / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": named}))
    assert await problems(base) == []


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for m in messages %}", "is not valid"),
        ("{{ messages[0].content.nothing() }}", "does not take messages: UndefinedError"),
        (
            "{{ raise_exception('roles must alternate') }}",
            "does not take messages: TemplateError: roles must alternate",
        ),
        ("{{ messages | nofilter }}", "is not valid"),
        ("{% if tools %}{{ tools.x.y }}{% endif %}{{ messages | tojson }}", "does not take tools"),
        (
            "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
            "{{ m.content }}{% endfor %}",
            "does not take a tool call and its result: TemplateError: no tools",
        ),
        ("hello", "leaves out what the user says"),
    ],
)
async def test_a_template_is_rendered_with_tools(base: Path, template: str, message: str) -> None:
    (base / "chat_template.jinja").write_text(template)
    (problem,) = await problems(base)
    assert problem.startswith(f"setting trainer.base = {str(base)!r}: its chat template")
    assert message in problem


async def test_marks_of_generation_and_loop_controls_are_known(base: Path) -> None:
    (base / "chat_template.jinja").write_text(
        "{{ bos_token }}{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{% if loop.last %}{% break %}{% endif %}{% endfor %}{{ strftime_now('%Y') }}"
    )
    assert await problems(base) == []


async def test_what_is_missing_or_broken_is_named(base: Path) -> None:
    weights = base / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    (base / "tokenizer.json").write_text("{}")
    (base / "config.json").write_text("{")
    message = "\n".join(await problems(base))
    assert "10 bytes are missing" in message
    assert "tokenizer.json cannot be used" in message
    assert "has no config.json that can be read" in message
    weights.write_bytes(b"PK\x03\x04 this is a pickle in a zip")
    assert "is not a safetensors file: its header has an impossible length" in "\n".join(await problems(base))
    (only,) = await problems(base / "nowhere")
    assert "is not a folder" in only


def test_without_a_comparison_torch_is_not_imported(base: Path) -> None:
    code = (
        "import asyncio, sys; from headrace_trainer.check import check;"
        "from headrace_runtime.settings.sections import Common; from headrace_trainer.settings import TrainerSettings;"
        f"assert not asyncio.run(check(Common(), TrainerSettings(base={str(base)!r}, native={{'tokens': 0}})));"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stdout.strip() == "[]"
