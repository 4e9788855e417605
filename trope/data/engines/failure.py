"""An engine's failure as an error that says what to do."""

from __future__ import annotations

from trope.data.sources.description import Source


def explain(error: Exception, source: Source) -> BaseException:
    """What to raise in place of an engine's own error."""
    text = str(error)
    said = text.strip().splitlines()[0] if text.strip() else type(error).__name__
    if "INTERRUPT" in text or "Query interrupted" in text:  # DuckDB's word for Ctrl-C in the middle of a query
        return KeyboardInterrupt()
    if "No space left" in text or "max_temp_directory_size" in text:
        return ValueError(f"no space left for intermediate tables: {said}; free some disk and run again")
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
    return ValueError(f"cannot read {source.name}: {said}; is a file truncated or damaged?")
