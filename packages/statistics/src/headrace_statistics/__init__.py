"""Statistics that decide: e-processes, confidence sequences, intervals, Student's t, agreement of raters.

They need no other package.
"""
