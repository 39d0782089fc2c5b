-- abort.lua
-- Purpose:   records that the run has failed, and tells every rank and every reader of an answer.
-- Invariant: the first failure wins; later ones change nothing.
-- KEYS:      1 run (hash)  2 workflow (hash)  3 requests (list)  4 ...: the queue of every rank (list)
-- ARGV:      1 seconds keys live  2 why, naming the rank  3 prefix of the answer keys (their numbers are known only here)
-- Returns:   1 if this was the first failure, else 0
if redis.call('HSETNX', KEYS[1], 'failure', ARGV[2]) == 0 then
  return 0
end
redis.call('EXPIRE', KEYS[1], ARGV[1])
local text = cjson.encode(ARGV[2])
for index = 4, #KEYS do -- in front of everything else, so that a rank hears it first
  redis.call('LPUSH', KEYS[index], '{"kind":"abort","text":' .. text .. '}')
  redis.call('EXPIRE', KEYS[index], ARGV[1])
end

local numbers = {}
local current = redis.call('HMGET', KEYS[2], 'number', 'running')
if current[2] == '1' then
  table.insert(numbers, current[1])
end
for number = tonumber(current[1] or '-1') + 1, tonumber(redis.call('HGET', KEYS[1], 'submitted') or '0') - 1 do
  table.insert(numbers, tostring(number)) -- submitted and not begun yet
end
for _, number in ipairs(numbers) do
  local answer = ARGV[3] .. number
  redis.call('XADD', answer, '*', 'event', '{"kind":"abort","text":' .. text .. '}')
  redis.call('EXPIRE', answer, ARGV[1])
end
return 1
