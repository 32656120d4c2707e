"""DSPy's ReAct."""

import sys
from typing import Any

import dspy


def search(query: str) -> str:
    """Find mails."""
    return f"Ada wrote about {query}"


dspy.configure(lm=dspy.LM("openai/gpt-4o", api_base=f"{sys.argv[1]}/v1", api_key="none", cache=False))
react: Any = dspy.ReAct("question -> answer", tools=[search])
print(react(question=sys.argv[2]).answer)
