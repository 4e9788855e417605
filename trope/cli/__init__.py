"""The command line: one module per command; `main` collects them."""
