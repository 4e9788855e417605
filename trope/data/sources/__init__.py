"""Sources of events: files, tables in a database, and public datasets by name."""
