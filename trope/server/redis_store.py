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

from trope.server.schema import Event
from trope.server.store import Past, Stored, StoreError

STREAM, POSITION, USER, ONCE = "trope:events", "trope:position", "trope:user:", "trope:event_ids"
KEPT = 10_000
"""Events of a user's list; older ones stay in the stream."""
_SECONDS = 5.0
_PER_CALL = 1_000
_APPEND = f"""
local new = {{}}
for i = 1, #ARGV, 4 do
    local user, item, time, once = ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3]
    if once == '' or redis.call('SADD', '{ONCE}', once) == 1 then
        local position = redis.call('INCR', '{POSITION}')
        redis.call('XADD', '{STREAM}', position .. '-0', 'u', user, 'i', item, 't', time)
        redis.call('RPUSH', '{USER}' .. user, '[' .. position .. ',' .. item .. ',' .. time .. ']')
        redis.call('LTRIM', '{USER}' .. user, -{KEPT}, -1)
        new[#new + 1] = 1
    else
        new[#new + 1] = 0
    end
end
return new
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
        except (redis.RedisError, ValueError) as error:
            shown = url.rpartition("@")[2]  # without a password
            raise ValueError(f"cannot open the store {shown}: {error}; does Redis run there?") from None

    def _flushes_always(self) -> bool:
        try:
            found = self._client.config_get("appendonly", "appendfsync")
        except redis.RedisError:  # hosted servers do not tell
            return False
        return (found.get("appendonly"), found.get("appendfsync")) == ("yes", "always")

    def append(self, posts: Sequence[Sequence[Event]]) -> list[int]:
        """See `Store`. More than a thousand events go in several steps, each of them whole."""
        events = [event for post in posts for event in post]
        new: list[int] = []
        with _one_line(self.where):
            for first in range(0, len(events), _PER_CALL):
                arguments: list[str | bytes | int] = []
                for event in events[first : first + _PER_CALL]:
                    arguments += (event.user, orjson.dumps(event.item), event.time, event.event_id or "")
                new += self._append(args=arguments)
        flags = iter(new)
        return [sum(next(flags) for _ in post) for post in posts]

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
