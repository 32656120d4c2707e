"""`headrace demo`: an agent visibly gets better from its own calls. A demo is a folder with a `demo.toml`."""
