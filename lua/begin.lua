-- uses: graph
-- begin.lua
-- Purpose:   starts the workflow of a request: deletes the state of the previous one, tells every rank of the request and adds
--            the initial tasks.
-- Invariant: at most one request runs at a time. A rank gets the opening once, before any task of the request.
-- KEYS:      as in graph.lua
-- ARGV:      1 time to live of the keys in seconds  2 request number  3 entry ranks as ",1,3,"  4 trace ("1" or "0")
--            5 planned tasks, JSON [[id, [ids it depends on], payload JSON text], ...]  6 opening of the request, JSON
-- Returns:   1; error PIPEDEC FAILED if the run has failed, PIPEDEC BUSY if a request is running (nothing changes)
local planned = cjson.decode(ARGV[5])
local failure = redis.call('HGET', RUN, 'failure')
if failure then
  return redis.error_reply('PIPEDEC FAILED ' .. failure)
end
if redis.call('HGET', WORKFLOW, 'running') == '1' then
  return redis.error_reply('PIPEDEC BUSY request ' .. redis.call('HGET', WORKFLOW, 'number') .. ' is still running')
end

redis.call('DEL', WORKFLOW, DONE, PENDING, BITMAP, TRACE)
redis.call('HSET', WORKFLOW, 'number', NUMBER, 'running', '1', 'entries', ARGV[3], 'trace', ARGV[4],
  'cancelled', redis.call('SREM', CANCELLED, NUMBER))
graph.entries, graph.tracing = ARGV[3], ARGV[4] == '1'
graph.announce(ARGV[6])
for _, plan in ipairs(planned) do
  graph.add(plan, false)
end
graph.release(false)
return 1
