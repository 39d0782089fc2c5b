-- uses: fence
-- blame.lua
-- Purpose:   charges the losses of ranks during which a request was running to that request.
-- Invariant: afterwards no other running request is suspected. Supervisors do not count these losses.
-- KEYS:      1 run (hash)  2 attempts (hash)  3 recoveries (list)
-- ARGV:      1 request  2 epoch of the caller
-- Returns:   1; error PIPEDEC STALE if the run is in another epoch
local stale = fence.refusal(KEYS[1], ARGV[2])
if stale then
  return stale
end
local losses = redis.call('HGET', KEYS[2], 'losses:' .. ARGV[1]) or ''
for index, recovery in ipairs(redis.call('LRANGE', KEYS[3], 0, -1)) do
  for epoch in string.gmatch(losses, '%d+') do
    if string.find(recovery, '"epoch":' .. epoch .. ',', 1, true) then
      redis.call('LSET', KEYS[3], index - 1, '{"request":' .. ARGV[1] .. ',' .. string.sub(recovery, 2))
    end
  end
end
redis.call('DEL', KEYS[2])
return 1
