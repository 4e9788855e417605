"""Connection URLs: what of them may be shown, and which file they mean. Passwords and query strings stay secret."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote_plus, urlparse

# Where the part ends that may be shown: a query, a fragment, or parameters such as ";PWD=...".
_EXTRA = "[?#;]"
_FILE_SCHEMES = ("duckdb", "sqlite", "file")
_NO_FILES = (":memory:", "md:", "motherduck:")
# A shorter secret is hidden only as a whole word: "a" is part of every message.
_SHORT = 4


def shown(where: str) -> str:
    """A URL without login, query and fragment, or a path as it is, for messages and `meta.json`."""
    scheme, separator, rest = where.partition("://")
    if not separator:
        return where
    place, *extra = re.split(_EXTRA, rest, maxsplit=1)
    if extra and "@" in extra[0]:  # a "?" in the password, or an "@" in the query: nobody can tell
        return f"{scheme}://..."
    return f"{scheme}://{place.rsplit('@', 1)[-1]}"


def redacted(error: Exception, url: str) -> str:
    """The first line of a database's error, without what is secret in the URL."""
    said = str(error).strip() or type(error).__name__
    if url:
        said = said.replace(url, shown(url))
        for secret in sorted(_secrets(url), key=len, reverse=True):
            word = re.escape(secret)
            said = re.sub(word if len(secret) >= _SHORT else rf"(?<!\w){word}(?!\w)", "***", said)
    return said.splitlines()[0]


def local_file(url: str) -> Path | None:
    """The database file that a URL means, None for a server or for memory."""
    try:
        parsed = urlparse(url)
    except ValueError:  # Ibis refuses such a URL, too
        return None
    parts = [part for part in (parsed.netloc, parsed.path[bool(parsed.netloc) :]) if part]  # as Ibis does
    path = str(Path(*parts)) if parts else ":memory:"
    return None if parsed.scheme not in _FILE_SCHEMES or path.startswith(_NO_FILES) else Path(path)


def _secrets(url: str) -> set[str]:
    """Password and query values, whole and in the pieces that a parser may cut them into, also decoded."""
    rest = url.partition("://")[2]
    login, at, _ = rest.rpartition("@")
    found = [login.partition(":")[2] or login] if at else []
    for extra in re.split(_EXTRA, rest, maxsplit=1)[1:]:
        found += [item.partition("=")[2] or item for item in re.split("[?#;&]", extra)]
    found += [piece for secret in found for piece in re.split("[?#;&=/@:]", secret)]
    return {text for secret in found for text in (secret, unquote_plus(secret)) if text}
