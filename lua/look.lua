-- look.lua
-- Purpose:   returns in one call the state of the run for waiting clients, status commands and metrics.
-- Invariant: read-only.
-- KEYS:      1 run (hash)  2 running (set)  3 waiting (zset)  4 members (set)  5 recoveries (list)  6 + rank: alive of that
--            rank (string)
-- ARGV:      none
-- Returns:   {{failure, state, submitted, epoch, epoch served last, 1 if lost ranks are replaced, number of
--            recoveries, counters of rank 0, of rank 1, ...}, {running number, ...}, number of waiting requests,
--            {rank with a lease, ...}, {rank whose lease has expired, ...}, {last recoveries, JSON}}; what is not stored is nil
local run = {}
for index, field in ipairs({ 'failure', 'state', 'submitted', 'epoch', 'serving', 'recovers', 'recoveries' }) do
  run[index] = redis.call('HGET', KEYS[1], field)
end
local alive, expired = {}, {}
for rank = 0, #KEYS - 6 do
  table.insert(run, redis.call('HGET', KEYS[1], 'stats:' .. rank))
end
for _, rank in ipairs(redis.call('SMEMBERS', KEYS[4])) do
  table.insert(redis.call('EXISTS', KEYS[6 + rank]) == 1 and alive or expired, tonumber(rank))
end
return { run, redis.call('SMEMBERS', KEYS[2]), redis.call('ZCARD', KEYS[3]), alive, expired,
  redis.call('LRANGE', KEYS[5], 0, -1) }
