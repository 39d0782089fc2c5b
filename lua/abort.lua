-- abort.lua
-- Purpose:   records that the run has failed, and notifies every rank and every reader of an unfinished answer.
-- Invariant: only the first failure is recorded; later calls change nothing.
-- KEYS:      1 run (hash)  2 workflow (hash)  3 requests (list)  4 ...: the queue of every rank (list)
-- ARGV:      1 time to live of the keys in seconds  2 failure message, naming the rank  3 prefix of the answer keys (the numbers
--            of the unfinished requests are known only here)
-- Returns:   1 if this was the first failure, else 0
if redis.call('HSETNX', KEYS[1], 'failure', ARGV[2]) == 0 then
  return 0
end
redis.call('EXPIRE', KEYS[1], ARGV[1])
local text = cjson.encode(ARGV[2])
for index = 4, #KEYS do -- at the head of the queue, so that it is the next message the rank takes
  redis.call('LPUSH', KEYS[index], '{"kind":"abort","text":' .. text .. '}')
  redis.call('EXPIRE', KEYS[index], ARGV[1])
end

local numbers = {}
local current = redis.call('HMGET', KEYS[2], 'number', 'running')
if current[2] == '1' then
  table.insert(numbers, current[1])
end
for number = tonumber(current[1] or '-1') + 1, tonumber(redis.call('HGET', KEYS[1], 'submitted') or '0') - 1 do
  table.insert(numbers, tostring(number)) -- submitted but not begun
end
for _, number in ipairs(numbers) do
  local answer = ARGV[3] .. number
  redis.call('XADD', answer, '*', 'event', '{"kind":"abort","text":' .. text .. '}')
  redis.call('EXPIRE', answer, ARGV[1])
end
return 1
