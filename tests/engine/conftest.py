"""A Redis server for tests of one part beside a real scheduler."""

from support.whole_scheduler import redis_client, redis_server  # noqa: F401
