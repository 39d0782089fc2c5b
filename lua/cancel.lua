-- uses: room answers
-- cancel.lua
-- Purpose:   cancels a request: a waiting one ends at once, a running one as soon as rank 0 learns of it.
-- Invariant: no cancellation is lost: that of a running request is kept until the request has ended. A request that rank 0 has
--            taken and not begun counts as running.
-- KEYS:      1 waiting (zset)  2 requests (hash)  3 running (set)  4 cancelled (set)  5 unread (set)  6 answer (stream)
-- ARGV:      1 time to live of the keys in seconds  2 request number  3 event for the answer of a waiting request, JSON
-- Returns:   1 if the request will end early, 0 if it is unknown or has ended
local number = ARGV[2]
if redis.call('ZREM', KEYS[1], string.format('%016d', number)) == 1 then
  redis.call('HDEL', KEYS[2], number)
  answers.append(KEYS[6], KEYS[5], number, ARGV[3], ARGV[1])
  redis.call('SREM', KEYS[5], number)
  return 1
end
if redis.call('SISMEMBER', KEYS[3], number) == 1 then
  redis.call('SADD', KEYS[4], number)
  redis.call('EXPIRE', KEYS[4], ARGV[1])
  return 1
end
return 0
