"""Online experiments: assignment, exposures, analysis, simulation."""
