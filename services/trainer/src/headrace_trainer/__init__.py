"""Learns from the stream: experiences become optimizer steps, optimizer steps become versions."""
