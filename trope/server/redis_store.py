"""Events in Redis, for several servers: a stream that all follow, and a list for each user.

    trope:events        the stream; an entry's id is "POSITION-0"
    trope:position      the last position
    trope:user:ID       JSON [position, item, time] of the user's last events
    trope:event_ids     every event_id that was stored

One Lua script appends, so that an event is in all of them or in none. Redis itself decides when it writes to disk:
`appendonly yes` and `appendfsync always` make an acknowledged event durable. Redis Cluster is not supported.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import orjson
import redis

from trope.data.sources.urls import redacted, shown
from trope.server.schema import Event
from trope.server.store import Past, Stored, StoreError

STREAM, POSITION, USER, ONCE = "trope:events", "trope:position", "trope:user:", "trope:event_ids"
KEPT = 10_000
"""Events of a user's list; older ones stay in the stream."""
_SECONDS = 5.0
_NEW = ord("1")
# A script is not undone when a command in it fails, so the one that may fail comes before the others: XADD, where
# memory is full or the position was lost. An event_id that was noted before it would swallow the client's next try.
_APPEND = f"""
local rows, new = cjson.decode(ARGV[1]), {{}}
for i = 1, #rows, 4 do
    local user, item, time, once = rows[i], rows[i + 1], rows[i + 2], rows[i + 3]
    if once ~= '' and redis.call('SISMEMBER', '{ONCE}', once) == 1 then
        new[#new + 1] = '0'
    else
        local position = string.format('%.0f', (redis.call('GET', '{POSITION}') or 0) + 1)
        redis.call('XADD', '{STREAM}', position .. '-0', 'u', user, 'i', item, 't', time)
        redis.call('SET', '{POSITION}', position)
        redis.call('RPUSH', '{USER}' .. user, '[' .. position .. ',' .. item .. ',' .. time .. ']')
        redis.call('LTRIM', '{USER}' .. user, -{KEPT}, -1)
        if once ~= '' then redis.call('SADD', '{ONCE}', once) end
        new[#new + 1] = '1'
    end
end
return table.concat(new)
"""


class RedisStore:
    """A store in the database of a URL such as redis://127.0.0.1:6379/0."""

    def __init__(self, url: str) -> None:
        try:
            self._client = redis.Redis.from_url(url, socket_timeout=_SECONDS, socket_connect_timeout=_SECONDS)
            self.where = _without_password(self._client)
            self._client.ping()
            self._append = self._client.register_script(_APPEND)
            self.is_durable = self._flushes_always()
        except (redis.RedisError, ValueError, TypeError) as error:  # the latter of an option that there is not
            said = redacted(error, url)
            raise ValueError(f"cannot open the store {shown(url)}: {said}; does Redis run there?") from None

    def _flushes_always(self) -> bool:
        try:
            found = self._client.config_get("appendonly", "appendfsync")
        except redis.RedisError:  # hosted servers do not tell
            return False
        return (found.get("appendonly"), found.get("appendfsync")) == ("yes", "always")

    def append(self, posts: Sequence[Sequence[Event]]) -> list[int]:
        """See `Store`: one script, so all of them or none."""
        rows: list[str] = []  # in one argument: Redis takes a million arguments at most
        for post in posts:
            for event in post:
                rows += (event.user, orjson.dumps(event.item).decode(), str(event.time), event.event_id or "")
        with _one_line(self.where):
            new = iter(self._append(args=[orjson.dumps(rows)]))
        return [sum(next(new) == _NEW for _ in post) for post in posts]

    def after(self, position: int, most: int, since: int = 0) -> list[Stored]:
        """See `Store`."""
        with _one_line(self.where):
            found: Any = self._client.xrange(STREAM, min=f"{position + 1}-0", max="+", count=most)
        return [
            Stored(int(entry.partition(b"-")[0]), row[b"u"].decode(), orjson.loads(row[b"i"]), int(row[b"t"]))
            for entry, row in found
        ]

    def last_position(self) -> int:
        """See `Store`."""
        with _one_line(self.where):
            return int(self._client.get(POSITION) or 0)

    def histories(self, users: Sequence[str], most: int) -> list[list[Past]]:
        """See `Store`."""
        with _one_line(self.where), self._client.pipeline(transaction=False) as pipeline:
            for user in users:
                pipeline.lrange(f"{USER}{user}", -most, -1)
            found = pipeline.execute()
        return [[Past(*orjson.loads(row)) for row in rows] for rows in found]

    def describe(self) -> str:
        """See `Store`."""
        kept = "on disk when acknowledged" if self.is_durable else "not flushed to disk at each event (appendfsync)"
        return f"Redis {self.where}, {kept}"

    def close(self) -> None:
        """See `Store`."""
        self._client.close()


def _without_password(client: redis.Redis) -> str:
    settings = client.connection_pool.connection_kwargs
    return str(settings.get("path") or f"{settings.get('host')}:{settings.get('port')}/{settings.get('db', 0)}")


@contextmanager
def _one_line(where: str) -> Iterator[None]:
    try:
        yield
    except redis.RedisError as error:
        raise StoreError(f"the store Redis {where} does not answer: {' '.join(str(error).split())}") from None
