-- uses: graph
-- finish.lua
-- Purpose:   a rank reports a task done, schedules the tasks that follow from it, publishes events to the request's answer,
--            and gets its own next message, all in one round trip.
-- Invariant: a task takes effect once. Reported again by the same rank (its reply was lost), it changes nothing and gives
--            the same next message; reported for another request or without having been granted, it does nothing.
--            If the request has been cancelled, every sync scheduled from here on carries the cancellation.
-- KEYS:      as in graph.lua
-- ARGV:      1 seconds keys live  2 request number  3 rank  4 id of the finished task
--            5 planned tasks, JSON [[id, [ids before it], payload JSON text], ...]  6 events, JSON [event JSON text, ...]
-- Returns:   the rank's next message (JSON) or nil; error PIPEDEC LOST if the workflow is gone (FLUSHALL, expiry)
local rank, id = tonumber(ARGV[3]), ARGV[4]
local planned, events = cjson.decode(ARGV[5]), cjson.decode(ARGV[6])
local last, answer = 'last ' .. rank, 'reply ' .. rank
local now_running = redis.call('HMGET', WORKFLOW, 'number', 'entries', 'trace', 'cancelled', last, answer,
  'granted ' .. id)
if not now_running[1] then
  return redis.error_reply('PIPEDEC LOST the workflow is no longer stored')
end
if now_running[1] ~= NUMBER then
  return false
end
if not now_running[7] then
  if now_running[5] ~= id then
    return false
  end
  local message = now_running[6] ~= '' and now_running[6] or redis.call('LPOP', KEYS[FIRST_QUEUE + rank])
  redis.call('HSET', WORKFLOW, answer, message or '')
  return message
end

graph.entries, graph.tracing = now_running[2], now_running[3] == '1'
local transfer_finished = graph.report(id)
for _, plan in ipairs(planned) do
  graph.add(plan, now_running[4] == '1')
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
redis.call('HSET', WORKFLOW, last, id, answer, message or '')
return message
