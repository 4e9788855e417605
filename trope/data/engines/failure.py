"""An engine's failure as an error that says what to do."""

from __future__ import annotations

import re

from trope.data.engines.base import no_space
from trope.data.sources.description import Source
from trope.data.sources.urls import redacted

# What an executor's Python raised, at the end of a traceback; and what Java says where there is no such Python.
_RAISED = re.compile(r"^[A-Za-z_][\w.]*(?:Error|Exception): .*", re.MULTILINE)
_NO_PYTHON = re.compile(r'Cannot run program "[^"]*"')
_NOT_INSTALLED = ("ModuleNotFoundError", "ImportError", "PYTHON_VERSION_MISMATCH", "Cannot run program")


def explain(error: Exception, source: Source) -> BaseException:
    """What to raise in place of an engine's own error."""
    text = str(error)
    said = redacted(error, source.url) if text.strip() else type(error).__name__
    if "INTERRUPT" in text or "Query interrupted" in text:  # DuckDB's word for Ctrl-C in the middle of a query
        return KeyboardInterrupt()
    if full := no_space(error, said):
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
    if not source.url and (failed := _executor_said(text)):
        advice = "executors need this package under the driver's version of Python: name their Python in PYSPARK_PYTHON"
        hint = f"; {advice}" if any(word in failed for word in _NOT_INSTALLED) else ""
        return ValueError(f"an executor of Spark failed on {source.name}: {failed}{hint}")
    hint = f"check table {source.table!r} there" if source.url else "is a file truncated or damaged?"
    return ValueError(f"cannot read {source.name}: {said}; {hint}")


def _executor_said(text: str) -> str:
    """The line that says why the Python of an executor of Spark failed; empty for other errors."""
    if "from the Python worker" in text:
        return (_RAISED.findall(text) or ["its Python ended"])[-1]
    missing = _NO_PYTHON.search(text)
    return missing[0] if missing else ""
