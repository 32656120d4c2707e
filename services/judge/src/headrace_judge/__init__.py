"""An LLM judge as a source of rewards.

It reads trajectories, calls an OpenAI-compatible endpoint, and writes rewards.
"""
