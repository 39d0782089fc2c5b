-- uses: fence
-- leave.lua
-- Purpose:   gives up the lease of a rank that exits normally.
-- Invariant: a rank that has left is neither a member nor expired.
-- KEYS:      1 members (set)  2 alive of this rank (string)  3 run (hash)
-- ARGV:      1 rank  2 epoch of the caller
-- Returns:   1; error PIPEDEC STALE if the run is in another epoch
local stale = fence.refusal(KEYS[3], ARGV[2])
if stale then
  return stale
end
redis.call('SREM', KEYS[1], ARGV[1])
redis.call('DEL', KEYS[2])
return 1
