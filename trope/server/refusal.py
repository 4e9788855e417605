"""`Refused`: the one exception that becomes an answer with a 4xx or 503 code. Anything else is our own mistake."""

from __future__ import annotations


class Refused(Exception):
    """A request that is not answered.

    Args:
        message: one line: what is wrong, what was found, what to do.
        status: of HTTP.
        retry_after: seconds after which to try again.
    """

    def __init__(self, message: str, status: int = 400, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status, self.retry_after = status, retry_after
