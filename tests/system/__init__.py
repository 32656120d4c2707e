"""Runner of the test programs that play for minutes: `python -m tests.system` lists them."""
