-- uses: room fence
-- orphans.lua
-- Purpose:   ends the requests of owners whose lease has expired: waiting ones at once, running ones as soon as rank 0 learns of
--            it. Their answers are deleted.
-- Invariant: nothing changes for requests without an owner, or whose owner lives. A running request whose answer was deleted is
--            not written any more (see answers.lua).
-- KEYS:      1 owners (hash)  2 waiting (zset)  3 requests (hash)  4 running (set)  5 cancelled (set)  6 unread (set)
--            7 run (hash)
-- ARGV:      1 time to live of the keys in seconds  2 prefix of the owners' leases  3 prefix of the answer keys (whose
--            requests these are is known only here)  4 epoch of the caller
-- Returns:   list of the numbers of these requests
local stale = fence.refusal(KEYS[7], ARGV[4])
if stale then
  return stale
end
local lives, ended = {}, {}
local owners = redis.call('HGETALL', KEYS[1])
for index = 1, #owners, 2 do -- numbers and owners alternate
  local number, owner = owners[index], owners[index + 1]
  if lives[owner] == nil then
    lives[owner] = redis.call('EXISTS', ARGV[2] .. owner) == 1
  end
  if not lives[owner] then
    redis.call('HDEL', KEYS[1], number)
    redis.call('DEL', ARGV[3] .. number)
    if redis.call('ZREM', KEYS[2], string.format('%016d', number)) == 1 then
      redis.call('HDEL', KEYS[3], number)
    elseif redis.call('SISMEMBER', KEYS[4], number) == 1 then
      redis.call('SADD', KEYS[5], number)
      redis.call('SADD', KEYS[6], number)
    end
    table.insert(ended, tonumber(number))
  end
end
redis.call('EXPIRE', KEYS[5], ARGV[1])
redis.call('EXPIRE', KEYS[6], ARGV[1])
return ended
