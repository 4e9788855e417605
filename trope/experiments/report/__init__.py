"""Reports of comparisons and ablations: one page as data, written as Markdown, HTML and to the screen."""
