"""Online experiments: who is in which arm, what was shown, what it was worth, and a rehearsal with a known truth."""
