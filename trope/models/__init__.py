"""The recommender: item table, blocks, the network around them, and its files."""
