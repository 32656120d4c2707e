"""DSPy ReAct agent, which sends its requests through litellm: `dspy_agent.py BASE_URL MODEL`."""

import json
import sys

import dspy


def search(query: str) -> str:
    """Finds mails."""
    return f"Ada wrote about {query}"


def main(base_url: str, model: str) -> None:
    dspy.configure(lm=dspy.LM(f"openai/{model}", api_base=base_url, api_key="none", cache=False, num_retries=0))
    agent = dspy.ReAct("question -> answer", tools=[search], max_iters=4)
    answer = agent(question="Who wrote about the invoice?").answer
    print(json.dumps([{"answer": answer, "calls": len(dspy.settings.lm.history)}]))


main(sys.argv[1], sys.argv[2])
