"""An LLM judge as one more source of rewards: trajectories in, verdicts out, against any OpenAI-compatible endpoint."""
