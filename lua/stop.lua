-- uses: fence
-- stop.lua
-- Purpose:   asks every rank to end after the messages already in its queue.
-- Invariant: no request is accepted afterwards; a second call changes nothing.
-- KEYS:      1 run (hash)  2 ...: the queue of every rank (list)
-- ARGV:      1 time to live of the keys in seconds  2 the epoch whose queues these are
-- Returns:   1 if this was the first stop, else 0; error PIPEDEC STALE if the run is in another epoch
local stale = fence.refusal(KEYS[1], ARGV[2])
if stale then
  return stale
end
if redis.call('HGET', KEYS[1], 'state') == 'stopping' then
  return 0
end
redis.call('HSET', KEYS[1], 'state', 'stopping')
redis.call('EXPIRE', KEYS[1], ARGV[1])
for index = 2, #KEYS do
  redis.call('RPUSH', KEYS[index], '{"kind":"stop"}')
  redis.call('EXPIRE', KEYS[index], ARGV[1])
end
return 1
