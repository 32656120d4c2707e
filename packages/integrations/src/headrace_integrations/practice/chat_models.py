"""Chat models for workflows: AgentScope's `OpenAIChatModel` if AgentScope is installed, else a compatible class."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from headrace.errors import UsageError
from headrace_integrations.practice.runs import Run
from headrace_operations.arguments import check_unchanged, model_name, real_number, whole_number

_ENGINES = (
    "engines are replicas that `headrace up` starts; start them, attach to that Headrace with headrace.stack.attach, "
    "and leave this at 1"
)


@dataclass(frozen=True)
class ChatAnswer:
    """Answer of a `ChatModel`. `content` is a list of blocks as in AgentScope: text, thinking, tool_use."""

    content: Sequence[Mapping[str, Any]]
    usage: Any = None
    metadata: Mapping[str, Any] | None = None

    def get_text_content(self) -> str:
        return "".join(str(block["text"]) for block in self.content if block["type"] == "text")


@dataclass
class ChatModel:
    """Chat model with AgentScope's interface, `await model(messages, tools=...)`. It does not stream."""

    client: Any
    model_name: str
    generate_kwargs: Mapping[str, Any] = field(default_factory=dict)
    stream: bool = False

    def __post_init__(self) -> None:
        if self.stream:
            raise UsageError("stream = True: this model does not stream; leave stream out")

    async def __call__(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        tool_choice: Any = None,
        **more: Any,
    ) -> ChatAnswer:
        options = {**self.generate_kwargs, **more}
        options |= {"tools": list(tools)} if tools else {}
        options |= {"tool_choice": tool_choice} if tool_choice is not None else {}
        completion = await self.client.chat.completions.create(
            model=self.model_name, messages=list(messages), **options
        )
        message = completion.choices[0].message
        blocks: list[dict[str, Any]] = []
        if thought := getattr(message, "reasoning_content", None):
            blocks.append({"type": "thinking", "thinking": thought})
        if message.content:
            blocks.append({"type": "text", "text": message.content})
        blocks += [
            {"type": "tool_use", "id": call.id, "name": call.function.name, "input": _read(call)}
            for call in message.tool_calls or ()
        ]
        return ChatAnswer(blocks, completion.usage)


def chat_model(run: Run, config: Any) -> Any:
    """Return the chat model of one run. Its calls belong to the run's session."""
    options = sampling_options(config)
    client = run.openai()
    try:
        kind = import_module("agentscope.model").OpenAIChatModel
    except ImportError:
        return ChatModel(client, run.model, options)
    model = kind(model_name=run.model, api_key="-", stream=False, generate_kwargs=options)
    model.client = client
    return model


def sampling_options(config: Any) -> dict[str, Any]:
    """Return the options of a call for a `TunerModelConfig`. They include `top_p` only if it is not 1."""
    options: dict[str, Any] = {
        "temperature": real_number("temperature", config.temperature),
        "max_tokens": whole_number("max_tokens", config.max_tokens),
    }
    if config.top_p != 1:
        options["top_p"] = real_number("top_p", config.top_p)
    if config.enable_thinking is not None:
        options["extra_body"] = {"chat_template_kwargs": {"enable_thinking": config.enable_thinking}}
    return options


def check_engines(config: Any) -> None:
    """Raise `UsageError` if a `TunerModelConfig` sets options of engines or of other training services."""
    tinker = "Headrace trains with its own trainer; leave it out"
    check_unchanged(
        config,
        {
            "tinker_config": (None, tinker),
            **dict.fromkeys(("tensor_parallel_size", "inference_engine_num"), (1, _ENGINES)),
        },
    )


def _read(call: Any) -> Any:
    try:
        return json.loads(call.function.arguments)
    except (ValueError, RecursionError):
        return {}


def auxiliary_model(run: Run, name: str, model: Any) -> Any:
    """Return a chat model whose calls are not trained, because they form an evaluation session of their own.

    Args:
        run: the run that calls the model.
        name: name of the model in the workflow, which is part of the session's id.
        model: a chat model, which is returned unchanged, or a model of the gateway: its name, or an object with
            `model_path`.
    """
    path = model if isinstance(model, str) else getattr(model, "model_path", None)
    if path is None:
        return model
    options: dict[str, Any] = {}
    if not isinstance(model, str):
        check_engines(model)
        served = f"the gateway serves auxiliary_models[{name!r}] with its own setting; leave it out"
        check_unchanged(
            model,
            {
                "max_model_len": (None, served),
                "tool_call_parser": ("hermes", served),
                "reasoning_parser": ("deepseek_r1", served),
            },
        )
        options = sampling_options(model)
    headers = {"X-Session-Id": f"{run.run_id}.{name}", "X-Headrace-Purpose": "eval"}
    return ChatModel(run.stack.openai(headers), model_name(path) if run.stack.serving(path) is None else path, options)
