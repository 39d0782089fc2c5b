-- submit.lua
-- Purpose:   queues a request for rank 0.
-- Invariant: requests are accepted only while the run is up and has not failed; they are numbered from 0 without gaps.
-- KEYS:      1 run (hash)  2 requests (list)
-- ARGV:      1 time to live of the keys in seconds  2 the request's JSON
-- Returns:   the request's number; error PIPEDEC FAILED if the run has failed, PIPEDEC NOTUP if it is not up or is stopping
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
