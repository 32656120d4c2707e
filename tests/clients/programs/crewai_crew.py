"""A crew of one agent."""

import sys
from typing import Any

from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool


@tool("search")  # type: ignore[untyped-decorator, unused-ignore]
def search(query: str) -> str:
    """Find mails."""
    return f"Ada wrote about {query}"


model: Any = LLM(model="openai/gpt-4o", base_url=f"{sys.argv[1]}/v1", api_key="none", stream=True)
agent: Any = Agent(role="searcher", goal="You search.", backstory="You are quick.", llm=model, tools=[search])
task: Any = Task(description=sys.argv[2], expected_output="One sentence.", agent=agent)
print("\n" + str(Crew(agents=[agent], tasks=[task]).kickoff()))
