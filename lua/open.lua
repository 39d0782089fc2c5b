-- open.lua
-- Purpose:   declares a run up, so that requests are accepted.
-- Invariant: a run id can be opened only once.
-- KEYS:      1 run (hash)
-- ARGV:      1 time to live of the keys in seconds  2 description of the run for clients, JSON  3 first and last stage of each
--            group, as "1-2 3-3"  4 duplex of the links ("half" or "full")  5 how many requests run at the same time
--            6 how many may wait for a place among them
-- Returns:   1; error PIPEDEC INUSE if the run id is in use, PIPEDEC FAILED if the run has already failed
local failure = redis.call('HGET', KEYS[1], 'failure')
if failure then
  return redis.error_reply('PIPEDEC FAILED ' .. failure)
end
if redis.call('HEXISTS', KEYS[1], 'state') == 1 then
  return redis.error_reply('PIPEDEC INUSE this run id is already in use')
end
redis.call('HSET', KEYS[1], 'state', 'up', 'submitted', 0, 'description', ARGV[2], 'groups', ARGV[3], 'duplex', ARGV[4],
  'max_running', ARGV[5], 'max_waiting', ARGV[6])
redis.call('EXPIRE', KEYS[1], ARGV[1])
return 1
