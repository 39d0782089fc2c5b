-- uses: fence answers
-- publish.lua
-- Purpose:   appends events to the answers of any number of requests, and ends those requests whose last events these are;
--            notes rank 0's counters.
-- Invariant: events of a request that has ended are dropped. A request leaves the running ones in the same step in which its
--            answer gets its last events, and nothing of it is left but that answer.
-- KEYS:      1 running (set)  2 cancelled (set)  3 unread (set)  4 run (hash)  5 requests (hash)  6 attempts (hash)
--            7 ...: answers (streams), one for each item of ARGV[2]
-- ARGV:      1 time to live of the keys in seconds  2 JSON [[request number, 1 if it ends else 0, event JSON text, ...], ...]
--            3 counters of rank 0, JSON; empty if there is nothing new  4 epoch of the caller
-- Returns:   1; error PIPEDEC STALE if the run is in another epoch
local stale = fence.refusal(KEYS[4], ARGV[4])
if stale then
  return stale
end
for index, item in ipairs(cjson.decode(ARGV[2])) do
  local number = string.format('%d', item[1])
  if item[1] < 0 or redis.call('SISMEMBER', KEYS[1], number) == 1 then
    for place = 3, #item do
      answers.append(KEYS[6 + index], KEYS[3], number, item[place], ARGV[1])
      if string.find(item[place], '"token_ids":[[]%d') then
        redis.call('HDEL', KEYS[6], number)
      end
    end
  end
  if item[2] == 1 then
    redis.call('SREM', KEYS[1], number)
    redis.call('SREM', KEYS[2], number)
    redis.call('SREM', KEYS[3], number)
    redis.call('HDEL', KEYS[5], number)
    redis.call('HDEL', KEYS[6], number, 'losses:' .. number)
  end
end
if ARGV[3] ~= '' then
  redis.call('HSET', KEYS[4], 'stats:0', ARGV[3])
  redis.call('EXPIRE', KEYS[4], ARGV[1])
end
return 1
