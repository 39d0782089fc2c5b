-- uses: room fence grant graph
-- finish.lua
-- Purpose:   a rank reports tasks done, and schedules those that follow from them. What it is granted next comes to its queue.
-- Invariant: a task takes effect once: a report for another workflow, or of tasks that were not granted, does nothing.
-- KEYS:      as in graph.lua
-- ARGV:      1 time to live of the keys in seconds  2 number of the workflow  3 ids of the finished tasks, JSON
--            4 planned tasks, JSON [[id, [ids it depends on], payload JSON text], ...]  5 epoch of the caller
--            6 lines of the trace to keep from now on; empty for as many as before
-- Returns:   1, or 0 if nothing has changed; error PIPEDEC LOST if the workflow does not exist any more (FLUSHALL, expiry),
--            PIPEDEC STALE if the run is in another epoch
local stale = fence.refusal(RUN, ARGV[5])
if stale then
  return stale
end
local finished, planned = cjson.decode(ARGV[3]), cjson.decode(ARGV[4])
local stored = redis.call('HMGET', WORKFLOW, 'number', 'entries', 'trace')
if not stored[1] then
  return redis.error_reply('PIPEDEC LOST the workflow is no longer stored')
end
if stored[1] ~= NUMBER then
  return 0
end
local granted = {}
for index, id in ipairs(finished) do
  granted[index] = redis.call('HGET', WORKFLOW, 'granted ' .. id)
  if not granted[index] then
    return 0
  end
end
if ARGV[6] ~= '' then
  redis.call('HSET', WORKFLOW, 'trace', ARGV[6])
end
graph.entries, graph.trace_lines = stored[2], tonumber(ARGV[6] ~= '' and ARGV[6] or stored[3])
for index, id in ipairs(finished) do
  graph.report(id, granted[index])
end
for _, plan in ipairs(planned) do
  graph.add(plan)
end
for _, id in ipairs(finished) do
  graph.complete(id)
end
graph.release()
if string.sub(finished[#finished], 1, 6) == 'C:end:' then
  redis.call('HSET', WORKFLOW, 'running', '0')
  redis.call('DEL', DONE)
end
return 1
