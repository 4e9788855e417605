"""What `trope inspect` measured (`trope.data.inspect`), shown in the terminal or as one HTML page."""
