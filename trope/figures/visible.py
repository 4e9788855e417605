"""Text from outside, such as ids, names, paths and a run's last words, made safe to show.

Every place that prints or draws such text sends it through `visible` once: `trope.figures.html` for pages,
`trope.experiments.report.markdown` for Markdown, and each table of a terminal, as `Text(visible(name))`. rich's `Text`
reads no markup, but it lets escape codes through.
"""

from __future__ import annotations

import re

# Control characters, line and paragraph separators, overrides of the writing direction, halves of surrogate pairs.
_ACTING = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(words: str) -> str:
    r"""The text with every character that acts instead of being seen spelled out: `\x1b`, `\n`, `\u202e`."""
    return _ACTING.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), words)
