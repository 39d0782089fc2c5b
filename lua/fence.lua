-- fence.lua: keeps callers of other epochs out. Not a script of its own: shared by scripts that name it in their first line.
-- Purpose:   checks that a caller takes part in the run's present epoch.
-- Invariant: read-only. A run that is not stored is in epoch 0: its ranks meet before it is opened.
local fence = {}

-- run: key of the run hash. Returns the error reply for a caller of another epoch, else nil.
function fence.refusal(run, epoch)
  local present = redis.call('HGET', run, 'epoch') or '0'
  if present ~= epoch then
    return redis.error_reply('PIPEDEC STALE the run is in epoch ' .. present .. ', not in ' .. epoch)
  end
end
