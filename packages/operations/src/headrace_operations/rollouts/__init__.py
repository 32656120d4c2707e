"""Rollouts for people: the confidence sequence as text and as a picture."""
