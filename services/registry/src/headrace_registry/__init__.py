"""Versions earn their place: probed by every replica, played against held-out tasks, promoted, rolled back."""
