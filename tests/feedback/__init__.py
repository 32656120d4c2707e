"""Feedback of every kind from the door to the experience, against an oracle that hears it in order."""
