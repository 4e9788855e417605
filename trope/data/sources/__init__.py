"""Where events come from: files, warehouse tables and public datasets by name."""
