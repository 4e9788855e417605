"""Structured logs: one JSON object a line, to stderr. They hold no ids of users or items, and no keys."""

from __future__ import annotations

import sys
import time
from typing import Any

import orjson


class Log:
    """Writes lines.

    requests: whether each request gets a line; failures and what the server does always do.
    """

    def __init__(self, requests: bool = True) -> None:
        self.requests = requests

    def request(self, method: str, route: str, status: int, seconds: float, size: int) -> None:
        """One line for a request; `route` is the template, so that no id stands in it."""
        if self.requests or status >= 500:
            self.say("request", method=method, route=route, status=status, ms=round(1000 * seconds, 2), bytes=size)

    def say(self, event: str, **fields: Any) -> None:
        """One line for something that happened. A log that cannot be written, such as on a full disk, stops nobody."""
        line = orjson.dumps({"time": round(time.time(), 3), "event": event, **fields}, option=orjson.OPT_APPEND_NEWLINE)
        try:
            sys.stderr.buffer.write(line)
            sys.stderr.buffer.flush()
        except OSError:
            return
        except (AttributeError, ValueError):  # a replaced stderr has no bytes beneath, or is closed
            print(line.decode(), end="", file=sys.__stderr__)
