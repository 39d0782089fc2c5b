-- uses: room fence
-- recover.lua
-- Purpose:   ends the run's epoch, because ranks or Redis were lost: wakes all ranks up, and notes what happened.
-- Invariant: an epoch is ended once, however many callers ask for it. Nothing of the ended epoch's workflow is left but one
--            message in each queue. Requests, answers and cancellations stay. Unless Redis was the cause, or the epoch was not
--            served yet, the loss is counted for the request that rank 0 was trying alone, else for all running ones.
-- KEYS:      1 run (hash)  2 members (set)  3 running (set)  4 attempts (hash)  5 doing (hash)  6 suspects (hash)  7 ends (hash)
--            8 places (hash)  9 recoveries (list)  10 bell (list)  11 waiting (zset)  12 ...: alive of each rank (string),
--            then the queue of each rank in the epoch that ends (list), then workflow, done, trace and meeting of that epoch
-- ARGV:      1 time to live of the keys in seconds  2 the epoch to end  3 lost ranks, JSON list  4 reason  5 number of ranks
--            6 how many recoveries to keep  7 new places, JSON [[rank, node], ...]
--            8 whether the attempts are counted, 1 or 0
-- Returns:   the run's epoch; error PIPEDEC FAILED if the run has failed, PIPEDEC LOST if it is not stored
local run = redis.call('HMGET', KEYS[1], 'failure', 'state', 'epoch', 'serving')
if run[1] then
  return redis.error_reply('PIPEDEC FAILED ' .. run[1])
end
if not run[2] then
  return redis.error_reply('PIPEDEC LOST its keys were deleted')
end
if run[3] ~= ARGV[2] then
  return tonumber(run[3])
end
local ranks, time = tonumber(ARGV[5]), redis.call('TIME')
local epoch = redis.call('HINCRBY', KEYS[1], 'epoch', 1)
redis.call('HINCRBY', KEYS[1], 'recoveries', 1)
redis.call('RPUSH', KEYS[9], '{"epoch":' .. epoch .. ',"lost":' .. ARGV[3] .. ',"reason":' .. cjson.encode(ARGV[4]) .. ',"at_us":'
  .. string.format('%.0f', time[1] * 1000000 + time[2]) .. ',"served_us":null}')
redis.call('LTRIM', KEYS[9], -tonumber(ARGV[6]), -1)
if ARGV[8] == '1' and run[4] == run[3] then
  local tried = redis.call('HGET', KEYS[1], 'tried')
  for _, number in ipairs(tried and { tried } or redis.call('SMEMBERS', KEYS[3])) do
    local losses = redis.call('HGET', KEYS[4], 'losses:' .. number)
    redis.call('HINCRBY', KEYS[4], number, 1)
    redis.call('HSET', KEYS[4], 'losses:' .. number, (losses and losses .. ',' or '') .. epoch)
  end
end
redis.call('HDEL', KEYS[1], 'tried')
redis.call('DEL', KEYS[2], KEYS[5], KEYS[6], KEYS[7])
for _, place in ipairs(cjson.decode(ARGV[7])) do
  redis.call('HSET', KEYS[8], place[1], place[2])
end
local message = '{"kind":"recover","text":' .. cjson.encode(ARGV[4]) .. '}'
for index = 12, 11 + ranks do
  redis.call('DEL', KEYS[index])
  local queue = KEYS[index + ranks]
  redis.call('DEL', queue)
  redis.call('RPUSH', queue, message)
  redis.call('EXPIRE', queue, ARGV[1])
end
for index = 12 + 2 * ranks, #KEYS do
  redis.call('DEL', KEYS[index])
end
if redis.call('ZCARD', KEYS[11]) > 0 and redis.call('EXISTS', KEYS[10]) == 0 then -- a dead rank 0 may have taken the element
  redis.call('RPUSH', KEYS[10], '1')
  redis.call('EXPIRE', KEYS[10], ARGV[1])
end
redis.call('EXPIRE', KEYS[4], ARGV[1])
redis.call('EXPIRE', KEYS[8], ARGV[1])
redis.call('EXPIRE', KEYS[9], ARGV[1])
return epoch
