-- uses: graph
-- finish.lua
-- Purpose:   a rank reports a task done, schedules the tasks that follow from it, publishes events to the request's answer,
--            and receives its next message, all in one round trip.
-- Invariant: a task takes effect once. If the same rank reports it again (the reply was lost), nothing changes and the reply
--            is the same message. A report for another request, or of a task that was not granted, does nothing.
--            Once the request has been cancelled, every newly scheduled sync carries the cancellation.
-- KEYS:      as in graph.lua
-- ARGV:      1 time to live of the keys in seconds  2 request number  3 rank  4 id of the finished task
--            5 planned tasks, JSON [[id, [ids it depends on], payload JSON text], ...]  6 events, JSON [event JSON text, ...]
-- Returns:   the rank's next message (JSON), or nil if its queue is empty; error PIPEDEC LOST if the workflow does not exist
--            any more (FLUSHALL, expiry)
local rank, id = tonumber(ARGV[3]), ARGV[4]
local planned, events = cjson.decode(ARGV[5]), cjson.decode(ARGV[6])
local last, reply = 'last ' .. rank, 'reply ' .. rank
local stored = redis.call('HMGET', WORKFLOW, 'number', 'entries', 'trace', 'cancelled', last, reply,
  'granted ' .. id)
if not stored[1] then
  return redis.error_reply('PIPEDEC LOST the workflow is no longer stored')
end
if stored[1] ~= NUMBER then
  return false
end
if not stored[7] then
  if stored[5] ~= id then
    return false
  end
  local message = stored[6] ~= '' and stored[6] or redis.call('LPOP', KEYS[FIRST_QUEUE + rank])
  redis.call('HSET', WORKFLOW, reply, message or '')
  return message
end

graph.entries, graph.tracing = stored[2], stored[3] == '1'
local transfer_finished = graph.report(id)
for _, plan in ipairs(planned) do
  graph.add(plan, stored[4] == '1')
end
graph.complete(id)
graph.release(transfer_finished)
if string.sub(id, 1, 6) == 'C:end:' then
  redis.call('HSET', WORKFLOW, 'running', '0')
  redis.call('DEL', DONE)
end
for _, event in ipairs(events) do
  redis.call('XADD', ANSWER, 'MAXLEN', '~', 16384, '*', 'event', event)
  redis.call('EXPIRE', ANSWER, TTL)
end
local message = redis.call('LPOP', KEYS[FIRST_QUEUE + rank])
redis.call('HSET', WORKFLOW, last, id, reply, message or '')
return message
