-- uses: fence
-- open.lua
-- Purpose:   declares a run up, so that requests are accepted; in a later epoch, that its ranks serve again.
-- Invariant: a run id can be opened only once, and each of its later epochs.
-- KEYS:      1 run (hash)  2 recoveries (list)  3 + rank: queue of that rank (list)
-- ARGV:      1 time to live of the keys in seconds  2 description of the run for clients, JSON  3 first and last stage of each
--            group, as "1-2 3-3"  4 duplex of the links ("half" or "full")  5 how many requests run at the same time
--            6 how many may wait for a place among them  7 epoch  8 1 if lost ranks are replaced, else 0
-- Returns:   1; error PIPEDEC INUSE if the run id is in use, PIPEDEC FAILED if the run has already failed,
--            PIPEDEC STALE if it is in another epoch
local stale = fence.refusal(KEYS[1], ARGV[7])
if stale then
  return stale
end
local failure = redis.call('HGET', KEYS[1], 'failure')
if failure then
  return redis.error_reply('PIPEDEC FAILED ' .. failure)
end
if ARGV[7] == '0' and redis.call('HEXISTS', KEYS[1], 'state') == 1 then
  return redis.error_reply('PIPEDEC INUSE this run id is already in use')
end
redis.call('HSETNX', KEYS[1], 'state', 'up')
redis.call('HSETNX', KEYS[1], 'submitted', 0)
redis.call('HSET', KEYS[1], 'epoch', ARGV[7], 'serving', ARGV[7], 'recovers', ARGV[8], 'description', ARGV[2], 'groups', ARGV[3],
  'duplex', ARGV[4], 'max_running', ARGV[5], 'max_waiting', ARGV[6])
local recovery = redis.call('LINDEX', KEYS[2], -1)
if recovery then
  local time = redis.call('TIME')
  local served = string.format('"served_us":%.0f', time[1] * 1000000 + time[2])
  redis.call('LSET', KEYS[2], -1, (string.gsub(recovery, '"served_us":null', served)))
end
redis.call('EXPIRE', KEYS[1], ARGV[1])
if redis.call('HGET', KEYS[1], 'state') == 'stopping' then -- it was asked to stop in an epoch that has ended
  for index = 3, #KEYS do
    redis.call('RPUSH', KEYS[index], '{"kind":"stop"}')
    redis.call('EXPIRE', KEYS[index], ARGV[1])
  end
end
return 1
