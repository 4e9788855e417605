"""Engines that read the source and run the shared Ibis expressions: DuckDB and Spark."""
