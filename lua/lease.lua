-- lease.lua
-- Purpose:   a rank says that it is alive, and keeps the run's keys.
-- Invariant: the run's keys outlive its last sign of life by ARGV[1] seconds at most, whatever ended it. Leases run on the
--            server's clock alone.
-- KEYS:      1 members (set)  2 alive of this rank (string)  3 ...: every other key of the run
-- ARGV:      1 seconds keys live  2 milliseconds of the lease  3 rank
-- Returns:   1
redis.call('SADD', KEYS[1], ARGV[3])
redis.call('EXPIRE', KEYS[1], ARGV[1])
redis.call('SET', KEYS[2], '1', 'PX', ARGV[2])
for index = 3, #KEYS do
  redis.call('EXPIRE', KEYS[index], ARGV[1])
end
return 1
