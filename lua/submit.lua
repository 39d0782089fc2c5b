-- submit.lua
-- Purpose:   queues a request for rank 0.
-- Invariant: requests are accepted only while the run is up and has not failed, and while fewer are unfinished than it allows
--            (those for which there is a place do not count as waiting); they are numbered from 0 without gaps. While a request
--            waits that rank 0 has not looked for, the bell holds an element. An operation that is sent again under the same id,
--            because its reply was lost, submits nothing more and gets the same number.
-- KEYS:      1 run (hash)  2 waiting (zset)  3 requests (hash)  4 bell (list)  5 running (set)  6 owners (hash)
--            7 lease of its owner (string)  8 the operation (string)
-- ARGV:      1 time to live of the keys in seconds  2 the request's JSON  3 its priority, an integer; lower ones come first
--            4 its owner; empty for none  5 duration of the owner's lease in milliseconds  6 1 if the operation has an id, else 0
-- Returns:   the request's number; error PIPEDEC FAILED if the run has failed, PIPEDEC NOTUP if it is not up or is stopping,
--            PIPEDEC FULL if too many requests are unfinished
local known = ARGV[6] == '1' and redis.call('GET', KEYS[8])
if known then
  return tonumber(known)
end
local run = redis.call('HMGET', KEYS[1], 'failure', 'state', 'max_running', 'max_waiting')
if run[1] then
  return redis.error_reply('PIPEDEC FAILED ' .. run[1])
end
if run[2] ~= 'up' then
  return redis.error_reply('PIPEDEC NOTUP ' .. (run[2] == 'stopping' and 'the run is stopping' or 'the run is not up'))
end
local num_waiting, num_running = redis.call('ZCARD', KEYS[2]), redis.call('SCARD', KEYS[5])
if num_waiting + num_running >= run[3] + run[4] then
  return redis.error_reply('PIPEDEC FULL the cluster is full: ' .. num_running .. ' requests are running and ' .. num_waiting
    .. ' are waiting (--max-waiting ' .. run[4] .. '); submit the request again when some of them have been answered')
end
local number = redis.call('HINCRBY', KEYS[1], 'submitted', 1) - 1
if ARGV[6] == '1' then
  redis.call('SET', KEYS[8], number, 'EX', ARGV[1])
end
redis.call('ZADD', KEYS[2], ARGV[3], string.format('%016d', number)) -- members of one score are ordered by their text
redis.call('HSET', KEYS[3], number, ARGV[2])
if redis.call('EXISTS', KEYS[4]) == 0 then
  redis.call('RPUSH', KEYS[4], '1')
end
if ARGV[4] ~= '' then
  redis.call('HSET', KEYS[6], number, ARGV[4])
  redis.call('EXPIRE', KEYS[6], ARGV[1])
  redis.call('SET', KEYS[7], '1', 'PX', ARGV[5])
end
for index = 2, 4 do
  redis.call('EXPIRE', KEYS[index], ARGV[1])
end
return number
