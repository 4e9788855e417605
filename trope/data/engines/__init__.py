"""Engines read the source and run the shared Ibis expressions: DuckDB, Spark, or the database that holds a table."""
