-- uses: room fence grant graph answers
-- finish.lua
-- Purpose:   a rank reports a task done, schedules the tasks that follow from it, publishes events to answers, and receives its
--            next message, all in one round trip.
-- Invariant: a task takes effect once. If the same rank reports it again (the reply was lost), nothing changes and the reply
--            is the same message. A report for another workflow, or of a task that was not granted, does nothing.
--            Once a request has been cancelled, every newly scheduled sync of its workflow carries the cancellation.
--            An answer that has got its last event gets no other.
-- KEYS:      as in graph.lua
-- ARGV:      1 time to live of the keys in seconds  2 number of the workflow  3 rank  4 id of the finished task
--            5 planned tasks, JSON [[id, [ids it depends on], payload JSON text], ...]
--            6 events, JSON [[request number, event JSON text], ...]  7 prefix of the answer keys  8 epoch of the caller
-- Returns:   the rank's next message (JSON), or nil if its queue is empty; error PIPEDEC LOST if the workflow does not exist
--            any more (FLUSHALL, expiry), PIPEDEC STALE if the run is in another epoch
local stale = fence.refusal(RUN, ARGV[8])
if stale then
  return stale
end
local rank, id = tonumber(ARGV[3]), ARGV[4]
local planned, events = cjson.decode(ARGV[5]), cjson.decode(ARGV[6])
local last, reply = 'last ' .. rank, 'reply ' .. rank
local stored = redis.call('HMGET', WORKFLOW, 'number', 'entries', 'trace', last, reply, 'granted ' .. id)
if not stored[1] then
  return redis.error_reply('PIPEDEC LOST the workflow is no longer stored')
end
if stored[1] ~= NUMBER then
  return false
end
if not stored[6] then
  if stored[4] ~= id then
    return false
  end
  local message = stored[5] ~= '' and stored[5] or redis.call('LPOP', KEYS[FIRST_QUEUE + rank])
  redis.call('HSET', WORKFLOW, reply, message or '')
  return message
end

graph.entries, graph.trace_lines = stored[2], tonumber(stored[3])
local transfer_finished = graph.report(id)
for _, plan in ipairs(planned) do
  graph.add(plan)
end
graph.complete(id)
for _, event in ipairs(events) do
  local number = string.format('%d', event[1])
  if redis.call('SISMEMBER', RUNNING, number) == 1 then
    answers.append(ARGV[7] .. number, UNREAD, number, event[2], TTL)
  end
end
graph.release(transfer_finished)
if string.sub(id, 1, 6) == 'C:end:' then
  redis.call('HSET', WORKFLOW, 'running', '0')
  redis.call('DEL', DONE)
end
local message = redis.call('LPOP', KEYS[FIRST_QUEUE + rank])
redis.call('HSET', WORKFLOW, last, id, reply, message or '')
return message
