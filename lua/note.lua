-- uses: fence
-- note.lua
-- Purpose:   stores a rank's note for supervisors: which rank it has lost, or why its process ends.
-- Invariant: the first note of a rank in an epoch is kept.
-- KEYS:      1 run (hash)  2 notes (hash)
-- ARGV:      1 time to live of the keys in seconds  2 rank  3 note  4 epoch of the caller
-- Returns:   1; error PIPEDEC STALE if the run is in another epoch
local stale = fence.refusal(KEYS[1], ARGV[4])
if stale then
  return stale
end
redis.call('HSETNX', KEYS[2], ARGV[2], ARGV[3])
redis.call('EXPIRE', KEYS[2], ARGV[1])
return 1
