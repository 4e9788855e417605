"""The files of the page, with headers that let a browser load nothing else and run nothing that a name might hold."""

from __future__ import annotations

import os
from pathlib import Path, PurePath
from typing import Any

from starlette.responses import Response
from starlette.staticfiles import StaticFiles

FILES = Path(__file__).parent / "page"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
# Said here: what the machine believes of these endings may differ, and a browser runs no module of another type.
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}


class PageFiles(StaticFiles):
    """Serves `FILES` and nothing else."""

    def __init__(self) -> None:
        super().__init__(directory=FILES, html=True)

    def file_response(self, full_path: str | os.PathLike[str], *arguments: Any, **options: Any) -> Response:
        """See `StaticFiles`; the headers are added."""
        response = super().file_response(full_path, *arguments, **options)
        kind = _TYPES.get(PurePath(full_path).suffix)
        if kind is not None and "content-type" in response.headers:
            response.headers["content-type"] = f"{kind}; charset=utf-8"
        response.headers["content-security-policy"] = POLICY
        response.headers["x-content-type-options"] = "nosniff"
        response.headers["referrer-policy"] = "no-referrer"
        response.headers["cache-control"] = "no-cache"  # asked for again each time, answered 304 while it is the same
        return response
