"""The registry of versions: each is probed by every replica, played on held-out tasks, and promoted or rolled back."""
