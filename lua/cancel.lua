-- cancel.lua
-- Purpose:   cancels a request: a waiting one ends at once, a running one at its next verdict.
-- Invariant: no cancellation is lost: that of a request that rank 0 has taken but not begun is kept until it begins.
-- KEYS:      1 run (hash)  2 workflow (hash)  3 requests (list)  4 cancelled (set)  5 answer (stream)
-- ARGV:      1 time to live of the keys in seconds  2 request number  3 event for the answer of a waiting request, JSON
-- Returns:   1 if the request will end early, 0 if it is unknown or has ended
local number = tonumber(ARGV[2])
for _, waiting in ipairs(redis.call('LRANGE', KEYS[3], 0, -1)) do
  if string.match(waiting, '^{"kind":"request","number":(%d+),') == ARGV[2] then
    redis.call('LREM', KEYS[3], 1, waiting)
    redis.call('XADD', KEYS[5], '*', 'event', ARGV[3])
    redis.call('EXPIRE', KEYS[5], ARGV[1])
    return 1
  end
end
local current = redis.call('HMGET', KEYS[2], 'number', 'running')
if current[1] == ARGV[2] then
  if current[2] == '1' then
    redis.call('HSET', KEYS[2], 'cancelled', '1')
  end
  return tonumber(current[2])
end
local submitted = tonumber(redis.call('HGET', KEYS[1], 'submitted') or '0')
if number < submitted and number > tonumber(current[1] or '-1') then
  redis.call('SADD', KEYS[4], ARGV[2])
  redis.call('EXPIRE', KEYS[4], ARGV[1])
  return 1
end
return 0
