-- uses: room fence grant graph
-- begin.lua
-- Purpose:   starts the workflow of a session: deletes the state of the previous one, and adds the initial tasks.
-- Invariant: at most one workflow runs at a time.
-- KEYS:      as in graph.lua
-- ARGV:      1 time to live of the keys in seconds  2 number of the workflow  3 entry ranks as ",1,3,"  4 lines of its trace to
--            keep, 0 for no trace  5 planned tasks, JSON [[id, [ids it depends on], payload JSON text], ...]
--            6 epoch of the caller
-- Returns:   1; error PIPEDEC FAILED if the run has failed, PIPEDEC BUSY if a workflow is running, PIPEDEC NOTUP if the run is
--            not up (nothing changes), PIPEDEC STALE if the run is in another epoch
local stale = fence.refusal(RUN, ARGV[6])
if stale then
  return stale
end
local planned = cjson.decode(ARGV[5])
local run = redis.call('HMGET', RUN, 'failure', 'groups')
if run[1] then
  return redis.error_reply('PIPEDEC FAILED ' .. run[1])
end
if redis.call('HGET', WORKFLOW, 'running') == '1' then
  return redis.error_reply('PIPEDEC BUSY workflow ' .. redis.call('HGET', WORKFLOW, 'number') .. ' is still running')
end
if not run[2] then
  return redis.error_reply('PIPEDEC NOTUP the run is not up')
end

redis.call('DEL', WORKFLOW, DONE, TRACE)
redis.call('HSET', WORKFLOW, 'number', NUMBER, 'running', '1', 'entries', ARGV[3], 'trace', ARGV[4])
graph.entries, graph.trace_lines = ARGV[3], tonumber(ARGV[4])
for _, plan in ipairs(planned) do
  graph.add(plan)
end
graph.release()
return 1
