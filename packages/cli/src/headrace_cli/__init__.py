"""The `headrace` command. Commands parse options and print; `headrace_operations` does the work."""
