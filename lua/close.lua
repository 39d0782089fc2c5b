-- close.lua
-- Purpose:   deletes an answer that its reader has read or does not want any more.
-- Invariant: the answer of an unfinished request is not written again (see answers.lua).
-- KEYS:      1 answer (stream)  2 waiting (zset)  3 running (set)  4 unread (set)  5 owners (hash)
--            6 the operation that has submitted the request (string)
-- ARGV:      1 time to live of the keys in seconds  2 request number
-- Returns:   1
redis.call('DEL', KEYS[1], KEYS[6])
redis.call('HDEL', KEYS[5], ARGV[2])
if redis.call('SISMEMBER', KEYS[3], ARGV[2]) == 1 or redis.call('ZSCORE', KEYS[2], string.format('%016d', ARGV[2])) then
  redis.call('SADD', KEYS[4], ARGV[2])
  redis.call('EXPIRE', KEYS[4], ARGV[1])
end
return 1
