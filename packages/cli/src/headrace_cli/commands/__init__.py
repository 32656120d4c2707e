"""The commands, one file for each. A command imports its dependencies when it runs."""
