-- uses: fence
-- try.lua
-- Purpose:   notes which request rank 0 serves alone, because ranks were lost while it was running, and forgets the losses of
--            one that has passed its trial.
-- Invariant: at most one request is tried at a time, and none when an epoch begins.
-- KEYS:      1 run (hash)  2 attempts (hash)
-- ARGV:      1 request to try, empty for none  2 request that has passed, empty for none  3 epoch of the caller
-- Returns:   1; error PIPEDEC STALE if the run is in another epoch
local stale = fence.refusal(KEYS[1], ARGV[3])
if stale then
  return stale
end
if ARGV[2] ~= '' then
  redis.call('HDEL', KEYS[2], ARGV[2], 'losses:' .. ARGV[2])
end
if ARGV[1] ~= '' then
  redis.call('HSET', KEYS[1], 'tried', ARGV[1])
else
  redis.call('HDEL', KEYS[1], 'tried')
end
return 1
