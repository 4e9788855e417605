"""The command line: one file per command. `main` collects them."""
