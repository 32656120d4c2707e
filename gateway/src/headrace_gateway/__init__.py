"""The OpenAI-compatible door: every agent's model calls go through here and are captured with their exact tokens."""
