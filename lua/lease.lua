-- uses: fence
-- lease.lua
-- Purpose:   renews a rank's lease and the time to live of the run's keys, and notes the rank's counters.
-- Invariant: however a run ends, its keys expire ARGV[1] seconds after the last renewal. Only the server's clock times leases.
-- KEYS:      1 members (set)  2 alive of this rank (string)  3 running (set)  4 run (hash)  5 doing (hash)
--            6 ...: every other key of the run but answers
-- ARGV:      1 time to live of the keys in seconds  2 duration of the lease in milliseconds  3 rank  4 prefix of the answer keys
--            5 counters of the rank, JSON; empty if there are none
--            6 what it does, JSON; empty if that is not known  7 epoch of the caller
-- Note:      doing holds, for each rank, the time of its report in microseconds, a space, and the JSON
-- Returns:   1; error PIPEDEC STALE if the run is in another epoch
local stale = fence.refusal(KEYS[4], ARGV[7])
if stale then
  return stale
end
redis.call('SADD', KEYS[1], ARGV[3])
redis.call('EXPIRE', KEYS[1], ARGV[1])
redis.call('SET', KEYS[2], '1', 'PX', ARGV[2])
for index = 3, #KEYS do
  redis.call('EXPIRE', KEYS[index], ARGV[1])
end
for _, number in ipairs(redis.call('SMEMBERS', KEYS[3])) do
  redis.call('EXPIRE', ARGV[4] .. number, ARGV[1])
end
if ARGV[5] ~= '' and redis.call('HEXISTS', KEYS[4], 'state') == 1 then -- the run was not deleted
  redis.call('HSET', KEYS[4], 'stats:' .. ARGV[3], ARGV[5])
end
if ARGV[6] ~= '' then
  local time = redis.call('TIME')
  redis.call('HSET', KEYS[5], ARGV[3], string.format('%.0f', time[1] * 1000000 + time[2]) .. ' ' .. ARGV[6])
  redis.call('EXPIRE', KEYS[5], ARGV[1])
end
return 1
