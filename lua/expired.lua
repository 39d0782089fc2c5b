-- expired.lua
-- Purpose:   finds the ranks whose lease has expired.
-- Invariant: read-only.
-- KEYS:      1 members (set)  2 + rank: alive of that rank (string)
-- ARGV:      none
-- Returns:   list of ranks
local expired = {}
for _, rank in ipairs(redis.call('SMEMBERS', KEYS[1])) do
  if redis.call('EXISTS', KEYS[2 + rank]) == 0 then
    table.insert(expired, tonumber(rank))
  end
end
return expired
