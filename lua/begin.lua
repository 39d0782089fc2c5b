-- uses: room fence grant graph
-- begin.lua
-- Purpose:   starts a workflow, that of a session of windows or of one request: deletes the state of the previous one, tells
--            every rank of the request, if there is one, and adds the initial tasks.
-- Invariant: at most one workflow runs at a time. A rank gets the opening once, before any task of the request.
-- KEYS:      as in graph.lua
-- ARGV:      1 time to live of the keys in seconds  2 number of the workflow  3 entry ranks as ",1,3,"  4 lines of its trace to
--            keep, 0 for no trace  5 planned tasks, JSON [[id, [ids it depends on], payload JSON text], ...]  6 opening of the
--            request, JSON; empty for a session  7 epoch of the caller
-- Returns:   1; error PIPEDEC FAILED if the run has failed, PIPEDEC BUSY if a workflow is running,
--            PIPEDEC NOTUP if a session is to begin and the run is not up (nothing changes), PIPEDEC STALE if
--            the run is in another epoch
local stale = fence.refusal(RUN, ARGV[7])
if stale then
  return stale
end
local planned = cjson.decode(ARGV[5])
local failure = redis.call('HGET', RUN, 'failure')
if failure then
  return redis.error_reply('PIPEDEC FAILED ' .. failure)
end
if redis.call('HGET', WORKFLOW, 'running') == '1' then
  return redis.error_reply('PIPEDEC BUSY workflow ' .. redis.call('HGET', WORKFLOW, 'number') .. ' is still running')
end
if ARGV[6] == '' and redis.call('HEXISTS', RUN, 'groups') == 0 then
  return redis.error_reply('PIPEDEC NOTUP the run is not up')
end

redis.call('DEL', WORKFLOW, DONE, PENDING, BITMAP, TRACE)
redis.call('HSET', WORKFLOW, 'number', NUMBER, 'running', '1', 'entries', ARGV[3], 'trace', ARGV[4])
graph.entries, graph.trace_lines = ARGV[3], tonumber(ARGV[4])
if ARGV[6] ~= '' then
  graph.announce(ARGV[6])
end
for _, plan in ipairs(planned) do
  graph.add(plan)
end
graph.release(false)
return 1
