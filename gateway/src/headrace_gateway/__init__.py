"""The OpenAI-compatible gateway: it serves every agent's model calls and captures them with their exact tokens."""
