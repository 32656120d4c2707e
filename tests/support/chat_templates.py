"""Short forms of the chat templates of eight families, with the differences that matter in an agent's history."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from jinja2 import Template
from jinja2.sandbox import ImmutableSandboxedEnvironment

_CALL = '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments }}}'
_CHATML = (
    "{% for m in messages %}<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}\n"
    "{% if m.role == 'tool' %}<tool_response>\n{{ m.content }}\n</tool_response>{% else %}@THINKING@{{ m.content }}"
    "{% for call in m.tool_calls %}\n<tool_call>\n" + _CALL + "\n</tool_call>{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_THINKING = "{% if m.reasoning_content @WHEN@%}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
_AFTER_THE_LAST_USER = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}"
)

TEMPLATES: Mapping[str, str] = {
    "qwen2": _CHATML.replace("@THINKING@", ""),
    "qwen3, reasoning after the last user only": _AFTER_THE_LAST_USER
    + _CHATML.replace("@THINKING@", _THINKING.replace("@WHEN@", "and loop.index0 > ns.last ")),
    "interleaved reasoning": _CHATML.replace("@THINKING@", _THINKING.replace("@WHEN@", "")),
    "llama3, one call as the whole message": (
        "<|begin_of_text|>{% for m in messages %}<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}"
        "<|end_header_id|>\n\n{% if m.tool_calls %}" + _CALL.replace("call.", "m.tool_calls[0].") + "{% else %}"
        "{{ m.content | trim }}{% endif %}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
    ),
    "mistral, system prompt in the last user message, ids of calls": (
        "{% set system = messages[0].content if messages[0].role == 'system' else '' %}"
        "{% set rest = messages[1:] if messages[0].role == 'system' else messages %}<s>{% for m in rest %}"
        "{% if m.role == 'user' %}[INST] {% if loop.last %}{{ system }}\n\n{% endif %}{{ m.content }}[/INST]"
        "{% elif m.role == 'tool' %}[TOOL_RESULTS] {{ m.tool_call_id }} {{ m.content }}[/TOOL_RESULTS]"
        "{% else %} {{ m.content }}{% for call in m.tool_calls %}[TOOL_CALLS] " + _CALL + "{% endfor %}</s>{% endif %}"
        "{% endfor %}"
    ),
    "gemma, trimmed answers": (
        "<bos>{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else 'user' }}\n"
        "{{ m.content | trim }}{% for call in m.tool_calls %}\n```tool_code\n" + _CALL + "\n```{% endfor %}"
        "<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
    ),
    "deepseek-r1, reasoning is dropped": (
        "{% for m in messages %}{% if m.role == 'assistant' %}<|Assistant|>{{ m.content.split('</think>')[-1] }}"
        "{% for call in m.tool_calls %}<|tool_call_begin|>" + _CALL + "<|tool_call_end|>{% endfor %}<|end|>"
        "{% elif m.role == 'tool' %}<|tool_output_begin|>{{ m.content }}<|tool_output_end|>"
        "{% elif m.role == 'user' %}<|User|>{{ m.content }}{% else %}{{ m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|Assistant|>{% endif %}"
    ),
    "phi, one line for each message": (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for call in m.tool_calls %}<|tool_call|>"
        + _CALL
        + "<|/tool_call|>{% endfor %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    ),
}


@cache
def _compiled(family: str) -> Template:
    return ImmutableSandboxedEnvironment().from_string(TEMPLATES[family])


def render(family: str, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> str:
    """Return the prompt of `messages`, each with content and tool calls."""
    filled = [{"tool_calls": [], "reasoning_content": None, **message} for message in messages]
    return _compiled(family).render(messages=filled, add_generation_prompt=add_generation_prompt)
