-- uses: room fence
-- take.lua
-- Purpose:   gives rank 0 the next waiting requests, as many as it has room for, and the running ones that were cancelled.
-- Invariant: requests are taken in the order of (priority, number), each once. A taken request is running until publish.lua ends
--            it; its JSON is kept until then, because a new rank 0 needs it, and its cancellation is returned by every call. No
--            more are running than the run allows.
-- KEYS:      1 run (hash)  2 waiting (zset)  3 requests (hash)  4 running (set)  5 cancelled (set)  6 bell (list)
--            7 watchers (string)
-- ARGV:      1 time to live of the keys in seconds  2 how many requests at most  3 epoch of the caller
-- Returns:   {state of the run, {cancelled number, ...}, id of the newest watcher (empty without one), number, JSON, number,
--            JSON, ...}; error PIPEDEC FAILED if the run has failed, PIPEDEC LOST if it is no longer stored, PIPEDEC STALE if
--            the run is in another epoch
local stale = fence.refusal(KEYS[1], ARGV[3])
if stale then
  return stale
end
local run = redis.call('HMGET', KEYS[1], 'failure', 'state', 'max_running')
if run[1] then
  return redis.error_reply('PIPEDEC FAILED ' .. run[1])
end
if not run[2] then
  return redis.error_reply('PIPEDEC LOST its keys were deleted')
end
local reply = { run[2], redis.call('SMEMBERS', KEYS[5]), redis.call('GET', KEYS[7]) or '' }
local limit = tonumber(ARGV[2])
if run[2] ~= 'stopping' then -- the requests of a stopping run are taken to be refused
  limit = math.min(limit, tonumber(run[3]) - redis.call('SCARD', KEYS[4]))
end
if limit > 0 then
  local taken = redis.call('ZPOPMIN', KEYS[2], limit)
  for index = 1, #taken, 2 do -- members and scores alternate
    local number = string.format('%d', taken[index])
    table.insert(reply, number)
    table.insert(reply, redis.call('HGET', KEYS[3], number))
    redis.call('SADD', KEYS[4], number)
  end
  redis.call('EXPIRE', KEYS[4], ARGV[1])
  if redis.call('EXISTS', KEYS[2]) == 0 then
    redis.call('DEL', KEYS[6])
  end
end
return reply
