"""Agent that finds mails with one call of the right tool, trained on comparisons of its own runs."""
