"""The `headrace` command. `headrace_operations` does the work; commands parse options and print."""
