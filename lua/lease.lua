-- lease.lua
-- Purpose:   renews a rank's lease and the time to live of the run's keys, and notes the rank's counters.
-- Invariant: however a run ends, its keys expire ARGV[1] seconds after the last renewal. Only the server's clock times leases.
-- KEYS:      1 members (set)  2 alive of this rank (string)  3 running (set)  4 run (hash)  5 ...: every other key of the run but
--            answers
-- ARGV:      1 time to live of the keys in seconds  2 duration of the lease in milliseconds  3 rank  4 prefix of the answer keys
--            5 counters of the rank, JSON; empty if there are none
-- Returns:   1
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
return 1
