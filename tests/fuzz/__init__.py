"""The fuzzers: random logs against an oracle, damaged folders, and kills. `make fuzz` runs them; README.md explains."""
