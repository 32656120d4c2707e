"""An LLM judge as a source of rewards: reads trajectories, asks any OpenAI-compatible endpoint, writes rewards."""
