"""Who may call: keys, limits, and the errors of refusals."""
