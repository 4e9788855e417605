"""The paper's figures from a run, one module each, and the page around them."""
