"""Many trainings: variants, the ablation, recipes, the pool that runs them, and their reports."""
