"""The clients of the program: the environment of each, its command, and the packages that environments need."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from headrace_cli.commands.connect import AGENTS, Connection

PROGRAMS = Path(__file__).parent / "programs"
_LOOPS = (
    "openai_chat", "openai_responses", "anthropic_messages", "litellm_chat", "litellm_responses", "instructor_model",
)  # fmt: skip
PACKAGES: Mapping[str, tuple[str, ...]] = {
    "agents": (
        "openai", "anthropic", "openai-agents", "pydantic-ai-slim[openai,anthropic]", "langchain", "langchain-openai",
        "langchain-anthropic", "langgraph", "instructor",
    ),
    "assistants": (
        "agno", "haystack-ai", "llama-index-core", "llama-index-llms-openai", "openai", "semantic-kernel",
        "strands-agents[openai]",
    ),
    "frameworks": ("litellm", "smolagents[openai,litellm]", "dspy", "agentscope"),
    "agentscope-1": ("agentscope<2", "openai<2", "mcp<2", "pydantic<2.13", "greenlet", "tqdm"),
    "pydantic": ("pydantic-ai-slim[anthropic]", "anthropic<1"),
    "autogen": ("autogen-agentchat", "autogen-ext[openai]"),
    "adk": ("google-adk", "litellm"),
    "crewai": ("crewai",),
    "aider": ("aider-chat",),
    "node": (
        "openai", "@anthropic-ai/sdk", "ai", "@ai-sdk/openai", "@ai-sdk/anthropic", "zod", "@anthropic-ai/claude-code",
        "@openai/codex", "opencode-ai", "@qwen-code/qwen-code",
    ),
}  # fmt: skip
"""Environments with the packages in them: clients whose requirements exclude each other are apart."""


@dataclass(frozen=True)
class Call:
    """One conversation of a client."""

    url: str
    """The gateway, without `/v1`."""
    question: str
    environments: Path
    home: Path
    """A home directory of this conversation alone."""
    work: Path
    """A working directory with `note.txt`."""

    def bin(self, name: str) -> str:
        """Return the path of a program that npm installed."""
        return str(self.environments / "node" / "node_modules" / ".bin" / name)


@dataclass(frozen=True)
class Client:
    """A client with the abilities that its conversations use."""

    name: str
    package: str
    """The package whose version the table names."""
    environment: str
    abilities: str
    command: Callable[[Call], tuple[list[str], dict[str, str]]]
    """Returns the command line and the environment variables of a conversation."""
    runs: int = 2
    """Expected runs of two conversations."""
    branches: int | None = 2
    """Expected branches. None: the client rewrites its history, so each call may begin another branch."""
    typed: bool = False
    """Whether its usual way to an answer of a type holds turns to a grammar."""


def _python(program: str, *arguments: str, environment: str) -> Callable[[Call], tuple[list[str], dict[str, str]]]:
    def command(call: Call) -> tuple[list[str], dict[str, str]]:
        interpreter = call.environments / environment / "bin" / "python"
        file = PROGRAMS / ("loops.py" if program in _LOOPS else "frameworks.py")
        return [str(interpreter), str(file), program, call.url, call.question, *arguments], {}

    return command


def _agents(program: str, *arguments: str) -> Callable[[Call], tuple[list[str], dict[str, str]]]:
    return _python(program, *arguments, environment="agents")


def _frameworks(program: str, *arguments: str) -> Callable[[Call], tuple[list[str], dict[str, str]]]:
    return _python(program, *arguments, environment="frameworks")


def _on_both_apis(name: str, package: str, program: str) -> tuple[Client, Client]:
    """Return a framework's agent on chat completions and on Responses."""
    return (
        Client(f"{name}, chat", package, "assistants", _CHAT, _python(program, "chat", environment="assistants")),
        Client(f"{name}, Responses", package, "assistants", _RESPONSES,
               _python(program, "responses", environment="assistants")),
    )  # fmt: skip


def _node(program: str, *arguments: str) -> Callable[[Call], tuple[list[str], dict[str, str]]]:
    def command(call: Call) -> tuple[list[str], dict[str, str]]:
        folder = call.environments / "node"
        shutil.copy(PROGRAMS / f"{program}.mjs", folder)  # modules are found from the folder of the importing file
        return ["node", str(folder / f"{program}.mjs"), call.url, call.question, *arguments], {}

    return command


def _connected(agent: str, call: Call, model: str) -> str:
    """Return the configuration that `headrace connect` prints."""
    return AGENTS[agent].lines(Connection(call.url, "none", model))


def _claude_code(call: Call) -> tuple[list[str], dict[str, str]]:
    variables = {
        "ANTHROPIC_BASE_URL": call.url, "ANTHROPIC_API_KEY": "none", "DISABLE_AUTOUPDATER": "1",
        "DISABLE_TELEMETRY": "1", "DISABLE_ERROR_REPORTING": "1",
    }  # fmt: skip
    return [call.bin("claude"), "-p", call.question, "--output-format", "json", "--allowedTools", "Read"], variables


def _codex(call: Call) -> tuple[list[str], dict[str, str]]:
    home = call.home / ".codex"
    home.mkdir(exist_ok=True)
    (home / "config.toml").write_text(_connected("codex", call, "gpt-5-codex"))
    script = '"$0" exec --skip-git-repo-check "$1" && exec "$0" exec resume --skip-git-repo-check --last "$1"'
    return ["sh", "-c", script, call.bin("codex"), call.question], {"HEADRACE_API_KEY": "none", "CODEX_HOME": str(home)}


def _opencode(call: Call) -> tuple[list[str], dict[str, str]]:
    settings = json.loads(_connected("opencode", call, "gpt-5"))
    (call.work / "opencode.json").write_text(json.dumps({**settings, "autoupdate": False, "share": "disabled"}))
    return [call.bin("opencode"), "run", call.question], {}


def _qwen_code(call: Call) -> tuple[list[str], dict[str, str]]:
    variables = {"OPENAI_BASE_URL": f"{call.url}/v1", "OPENAI_API_KEY": "none", "OPENAI_MODEL": "qwen3-coder"}
    return [call.bin("qwen"), "-p", call.question, "--approval-mode", "yolo", "--auth-type", "openai"], variables


def _aider(call: Call) -> tuple[list[str], dict[str, str]]:
    program = str(call.environments / "aider" / "bin" / "aider")
    flags = ["--yes-always", "--no-git", "--no-check-update", "--no-show-model-warnings", "--no-analytics"]
    variables = {"OPENAI_API_BASE": f"{call.url}/v1", "OPENAI_API_KEY": "none", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    return [program, "--model", "openai/gpt-4o", *flags, "--message", call.question, "note.txt"], variables


_CHAT, _RESPONSES, _MESSAGES = (f"{api}, streamed, tools" for api in ("chat", "Responses", "Messages"))
_TYPED = f"{_CHAT}, a typed answer"
CLIENTS = (
    Client("openai, chat", "openai", "agents", _CHAT, _agents("openai_chat")),
    Client("openai, Responses", "openai", "agents", _RESPONSES, _agents("openai_responses")),
    Client("openai, previous_response_id", "openai", "agents", f"{_RESPONSES}, stateful",
           _agents("openai_responses", "previous_response_id")),
    Client("openai, conversation", "openai", "agents", f"{_RESPONSES}, stateful",
           _agents("openai_responses", "conversation")),
    Client("anthropic", "anthropic", "agents", _MESSAGES, _agents("anthropic_messages")),
    Client("openai-agents, defaults", "openai-agents", "agents", _RESPONSES, _agents("openai_agents")),
    Client("openai-agents, output_type", "openai-agents", "agents", f"{_RESPONSES}, a typed answer",
           _agents("openai_agents", "typed"), typed=True),
    Client("openai-agents, OpenAIConversationsSession", "openai-agents", "agents", f"{_RESPONSES}, stateful",
           _agents("openai_agents", "conversation")),
    Client("pydantic-ai, openai-chat:gpt-5", "pydantic-ai-slim", "agents", _CHAT,
           _agents("pydantic_agent", "openai-chat:gpt-5")),
    Client("pydantic-ai, openai-responses:gpt-5", "pydantic-ai-slim", "agents", _RESPONSES,
           _agents("pydantic_agent", "openai-responses:gpt-5")),
    Client("pydantic-ai, output_type", "pydantic-ai-slim", "agents", _TYPED,
           _agents("pydantic_agent", "openai-chat:gpt-5", "typed"), typed=True),
    Client("pydantic-ai, anthropic", "pydantic-ai-slim", "pydantic", _MESSAGES,
           _python("pydantic_agent", "anthropic:claude-sonnet-4-5", environment="pydantic")),
    Client("LangGraph, ChatOpenAI", "langgraph", "agents", _CHAT, _agents("langchain_agent", "openai")),
    Client("LangGraph, ChatAnthropic", "langgraph", "agents", _MESSAGES, _agents("langchain_agent", "anthropic")),
    Client("LangChain, ChatOpenAI", "langchain", "agents", _CHAT, _agents("langchain_agent", "openai", "plain")),
    Client("LangChain, response_format", "langchain", "agents", "chat, tools, a typed answer",
           _agents("langchain_agent", "openai", "typed"), typed=True),
    Client("instructor", "instructor", "agents", "chat, a forced tool", _agents("instructor_model"), typed=True),
    Client("litellm, openai", "litellm", "frameworks", _CHAT, _frameworks("litellm_chat", "openai")),
    Client("litellm, anthropic", "litellm", "frameworks", _MESSAGES, _frameworks("litellm_chat", "anthropic")),
    Client("litellm, Responses", "litellm", "frameworks", _RESPONSES, _frameworks("litellm_responses")),
    Client("smolagents, ToolCallingAgent", "smolagents", "frameworks", _CHAT,
           _frameworks("smolagents_agent", "tools"), branches=None, typed=True),
    Client("smolagents, CodeAgent", "smolagents", "frameworks", "chat, streamed, stop strings",
           _frameworks("smolagents_agent", "code")),
    Client("DSPy, ReAct", "dspy", "frameworks", "chat", _frameworks("dspy_react"), runs=8, branches=None),
    Client("AgentScope 1", "agentscope", "agentscope-1", _CHAT,
           _python("agentscope1_agent", environment="agentscope-1")),
    Client("AgentScope 1, structured_model", "agentscope", "agentscope-1", _TYPED,
           _python("agentscope1_agent", "typed", environment="agentscope-1"), branches=None, typed=True),
    Client("AgentScope 2", "agentscope", "frameworks", _CHAT, _frameworks("agentscope_agent")),
    Client("AgentScope 2, structured_schema", "agentscope", "frameworks", _TYPED,
           _frameworks("agentscope_agent", "typed"), typed=True),
    *_on_both_apis("agno", "agno", "agno_agent"),
    *_on_both_apis("Haystack", "haystack-ai", "haystack_agent"),
    *_on_both_apis("LlamaIndex", "llama-index-core", "llamaindex_agent"),
    *_on_both_apis("Semantic Kernel", "semantic-kernel", "semantic_kernel_agent"),
    *_on_both_apis("Strands", "strands-agents", "strands_agent"),
    Client("AutoGen", "autogen-agentchat", "autogen", _CHAT, _python("autogen_agent", environment="autogen")),
    Client("ADK on litellm", "google-adk", "adk", _CHAT, _python("adk_agent", environment="adk")),
    Client("CrewAI", "crewai", "crewai", _CHAT, _python("crewai_crew", environment="crewai"), branches=None),
    Client("openai for Node, chat", "openai", "node", _CHAT, _node("openai_chat")),
    Client("openai for Node, Responses", "openai", "node", _RESPONSES, _node("openai_responses")),
    Client("openai for Node, previous_response_id", "openai", "node", f"{_RESPONSES}, stateful",
           _node("openai_responses", "previous_response_id")),
    Client("anthropic for Node", "@anthropic-ai/sdk", "node", _MESSAGES, _node("anthropic_messages")),
    Client("Vercel AI SDK, openai", "ai", "node", f"{_RESPONSES}, text before calls", _node("vercel_ai")),
    Client("Vercel AI SDK, generateObject", "ai", "node", "Responses, a typed answer", _node("vercel_ai", "object"),
           typed=True),
    Client("Vercel AI SDK, anthropic", "ai", "node", f"{_MESSAGES}, text before calls",
           _node("vercel_ai", "anthropic")),
    Client("Claude Code", "@anthropic-ai/claude-code", "node", f"{_MESSAGES}, side calls", _claude_code),
    Client("Codex CLI, exec and resume", "@openai/codex", "node", _RESPONSES, _codex),
    Client("opencode", "opencode-ai", "node", f"{_CHAT}, side calls", _opencode),
    Client("qwen-code", "@qwen-code/qwen-code", "node", _CHAT, _qwen_code, branches=None),
    Client("aider", "aider-chat", "aider", "chat, streamed, temperature 0", _aider),
)  # fmt: skip
