"""An engine's failure as an error that says what to do."""

from __future__ import annotations

from trope.data.engines.base import no_space
from trope.data.sources.description import Source
from trope.data.sources.urls import redacted


def explain(error: Exception, source: Source) -> BaseException:
    """What to raise in place of an engine's own error."""
    text = str(error)
    said = redacted(error, source.url) if text.strip() else type(error).__name__
    if "INTERRUPT" in text or "Query interrupted" in text:  # DuckDB's word for Ctrl-C in the middle of a query
        return KeyboardInterrupt()
    if full := no_space(error):
        return ValueError(full)
    if isinstance(error, MemoryError) or "Out of Memory" in text or "OutOfMemoryError" in text:
        # Only where DuckDB names its own limit, "(4.6 GiB/4.6 GiB used)", would a higher one help.
        if " used)" in text:
            return ValueError(
                f"the memory limit is too low for {source.name}: {said}; raise it with --memory, or lower --threads"
            )
        return ValueError(
            f"the machine, or a limit on this process, has no memory left for {source.name}: {said}; "
            "lower --memory or --threads, so that more goes to disk"
        )
    hint = f"check table {source.table!r} there" if source.url else "is a file truncated or damaged?"
    return ValueError(f"cannot read {source.name}: {said}; {hint}")
