-- submit.lua
-- Purpose:   queues a request for rank 0.
-- Invariant: only a run that is up, has not failed and is not stopping takes requests; numbers count from 0 without gaps.
-- KEYS:      1 run (hash)  2 requests (list)
-- ARGV:      1 seconds keys live  2 the request's JSON
-- Returns:   the request's number; error PIPEDEC FAILED or PIPEDEC NOTUP
local run = redis.call('HMGET', KEYS[1], 'failure', 'state')
if run[1] then
  return redis.error_reply('PIPEDEC FAILED ' .. run[1])
end
if run[2] ~= 'up' then
  return redis.error_reply('PIPEDEC NOTUP ' .. (run[2] == 'stopping' and 'the run is stopping' or 'the run is not up'))
end
local number = redis.call('HINCRBY', KEYS[1], 'submitted', 1) - 1
redis.call('RPUSH', KEYS[2], '{"kind":"request","number":' .. number .. ',"text":' .. cjson.encode(ARGV[2]) .. '}')
redis.call('EXPIRE', KEYS[2], ARGV[1])
return number
