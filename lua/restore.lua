-- restore.lua
-- Purpose:   writes back what rank 0 knows of a run that Redis has lost, in its next epoch.
-- Invariant: a run that is stored is not changed. Requests that waited are gone: their clients submit them again.
-- KEYS:      1 run (hash)  2 running (set)  3 requests (hash)  4 recoveries (list)  5 ...: answers (streams), one per request
-- ARGV:      1 time to live of the keys in seconds  2 the epoch that has ended  3 description of the run for clients, JSON
--            4 first and last stage of each group, as in open.lua  5 duplex of the links  6 how many requests run at the same
--            time  7 how many may wait  8 number of the next request  9 reason
--            10 JSON [[request number, request's JSON, event JSON text, ...], ...]
-- Returns:   the run's epoch
local stored = redis.call('HGET', KEYS[1], 'epoch')
if stored then
  return tonumber(stored)
end
local epoch, time = ARGV[2] + 1, redis.call('TIME')
redis.call('HSET', KEYS[1], 'state', 'up', 'epoch', epoch, 'serving', ARGV[2], 'recovers', 1, 'recoveries', epoch,
  'description', ARGV[3], 'groups', ARGV[4], 'duplex', ARGV[5], 'max_running', ARGV[6],
  'max_waiting', ARGV[7], 'submitted', ARGV[8])
redis.call('RPUSH', KEYS[4], '{"epoch":' .. epoch .. ',"lost":[],"reason":' .. cjson.encode(ARGV[9]) .. ',"at_us":'
  .. string.format('%.0f', time[1] * 1000000 + time[2]) .. ',"served_us":null}')
for index, item in ipairs(cjson.decode(ARGV[10])) do
  local number, answer = string.format('%d', item[1]), KEYS[4 + index]
  redis.call('SADD', KEYS[2], number)
  redis.call('HSET', KEYS[3], number, item[2])
  redis.call('DEL', answer)
  for place = 3, #item do
    redis.call('XADD', answer, '*', 'event', item[place])
  end
  redis.call('EXPIRE', answer, ARGV[1])
end
for index = 1, 4 do
  redis.call('EXPIRE', KEYS[index], ARGV[1])
end
return epoch
