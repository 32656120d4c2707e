"""Core of stream services: records become effects and events, once."""
