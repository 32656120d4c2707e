"""An agent that finds mails with one call of the right tool, and learns from comparisons of its own runs."""
