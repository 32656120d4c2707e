"""`headrace demo`: an agent that improves from its own calls. A demo is a folder with a `demo.toml`."""
