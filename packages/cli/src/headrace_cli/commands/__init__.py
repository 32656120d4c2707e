"""The commands, one file for each; what a command needs is imported when it runs."""
