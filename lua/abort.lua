-- uses: fence answers
-- abort.lua
-- Purpose:   records that the run has failed, and notifies every rank and every reader of an unfinished answer.
-- Invariant: only the first failure is recorded; later calls change nothing.
-- KEYS:      1 run (hash)  2 waiting (zset)  3 running (set)  4 unread (set)  5 ...: the queue of every rank (list)
-- ARGV:      1 time to live of the keys in seconds  2 failure message, naming the rank  3 prefix of the answer keys (the numbers
--            of the unfinished requests are known only here)  4 epoch of the caller
-- Returns:   1 if this was the first failure, else 0; error PIPEDEC STALE if the run is in another epoch
local stale = fence.refusal(KEYS[1], ARGV[4])
if stale then
  return stale
end
if redis.call('HSETNX', KEYS[1], 'failure', ARGV[2]) == 0 then
  return 0
end
redis.call('EXPIRE', KEYS[1], ARGV[1])
local text = cjson.encode(ARGV[2])
for index = 5, #KEYS do -- at the head of the queue, so that it is the next message the rank takes
  redis.call('LPUSH', KEYS[index], '{"kind":"abort","text":' .. text .. '}')
  redis.call('EXPIRE', KEYS[index], ARGV[1])
end

local event = '{"kind":"abort","text":' .. text .. '}'
for _, number in ipairs(redis.call('SMEMBERS', KEYS[3])) do
  answers.append(ARGV[3] .. number, KEYS[4], number, event, ARGV[1])
end
for _, member in ipairs(redis.call('ZRANGE', KEYS[2], 0, -1)) do
  local number = string.format('%d', member)
  answers.append(ARGV[3] .. number, KEYS[4], number, event, ARGV[1])
end
return 1
