-- graph.lua: the task graph of one request. Not a script of its own: shared by begin.lua and finish.lua; the loader puts it
-- in front of every script whose first line is "-- uses: graph".
-- Purpose:   adds tasks with their dependencies, completes tasks, releases the tasks that waited for them, and grants
--            transfers without conflict (the paper's Algorithm 2).
-- Invariant: a task is granted once, after all its dependencies are done; a rank takes part in at most one granted transfer.
-- KEYS:      1 workflow (hash)  2 done (zset)  3 pending (list)  4 bitmap (string)  5 trace (list)  6 run (hash)
--            7 answer (stream)  8 cancelled (set)  9 + rank: queue of that rank (list)
-- ARGV:      1 time to live of the keys in seconds  2 request number
local WORKFLOW, DONE, PENDING, BITMAP, TRACE, RUN = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local ANSWER, CANCELLED, FIRST_QUEUE = KEYS[7], KEYS[8], 9
local TTL, NUMBER = ARGV[1], ARGV[2]

local graph = { ready = {}, entries = '', tracing = false }

local function split(id)
  local kind, name, target, seq = string.match(id, '^(%a):([^:]+):([^:]+):(%-?%d+)$')
  return kind, name, target, tonumber(seq)
end

-- Redis time in microseconds, as a string (tostring of a Lua number keeps too few digits).
local function now()
  local time = redis.call('TIME')
  return string.format('%.0f', time[1] * 1000000 + time[2])
end

-- Adds a task {id, {ids it depends on}, payload}. A task without unmet dependencies goes to graph.ready and is not stored.
function graph.add(planned, cancelled)
  local id, payload = planned[1], planned[3]
  local kind, name, target, seq = split(id)
  local unmet = 0
  for _, before in ipairs(planned[2]) do
    if not redis.call('ZSCORE', DONE, before) then
      unmet = unmet + 1
      local field = 'next ' .. before
      local others = redis.call('HGET', WORKFLOW, field)
      redis.call('HSET', WORKFLOW, field, others and (others .. ' ' .. id) or id)
    end
  end
  if kind == 'C' and name == 'dec' and string.find(graph.entries, ',' .. target .. ',', 1, true) then
    local field = 'active ' .. seq
    local others = redis.call('HGET', WORKFLOW, field)
    redis.call('HSET', WORKFLOW, field, others and (others .. ',' .. target) or target)
  end
  if cancelled and kind == 'C' and name == 'sync' then
    payload = payload .. ',"cancelled":true'
  end
  if unmet == 0 then
    table.insert(graph.ready, { id, payload })
  else
    redis.call('HSET', WORKFLOW, 'task ' .. id, payload, 'unmet ' .. id, unmet)
  end
end

-- Marks a task done, and moves the tasks that had no other unmet dependency to graph.ready.
function graph.complete(id)
  local kind, _, target, seq = split(id)
  redis.call('ZADD', DONE, seq, id)
  local field = 'next ' .. id
  local others = redis.call('HGET', WORKFLOW, field)
  if others then
    redis.call('HDEL', WORKFLOW, field)
    for other in string.gmatch(others, '%S+') do
      if redis.call('HINCRBY', WORKFLOW, 'unmet ' .. other, -1) == 0 then
        local payload = redis.call('HGET', WORKFLOW, 'task ' .. other)
        redis.call('HDEL', WORKFLOW, 'task ' .. other, 'unmet ' .. other)
        table.insert(graph.ready, { other, payload })
      end
    end
  end
  if kind == 'V' and target == 'all' then -- the barrier: no later task depends on earlier timesteps
    redis.call('ZREMRANGEBYSCORE', DONE, '-inf', seq - 1)
    redis.call('HDEL', WORKFLOW, 'active ' .. seq)
  end
end

local function push(rank, message)
  local queue = KEYS[FIRST_QUEUE + rank]
  redis.call('RPUSH', queue, message)
  redis.call('EXPIRE', queue, TTL)
end

-- Tells every rank what it must know of the request (JSON), before it gets a task.
function graph.announce(opening)
  for rank = 0, #KEYS - FIRST_QUEUE do
    push(rank, '{"kind":"open","number":' .. NUMBER .. ',"opening":' .. opening .. '}')
  end
end

local function message_of(id, payload, active)
  return '{"kind":"task","number":' .. NUMBER .. ',"task":"' .. id .. '","active":[' .. (active or '')
    .. '],"payload":' .. payload .. '}'
end

local function grant(id)
  redis.call('HSET', WORKFLOW, 'granted ' .. id, graph.tracing and now() or '0')
end

-- Algorithm 2, lines 9 to 17: in order of arrival, grant the transfers whose two ranks are both free.
function graph.grant_transfers()
  for _, id in ipairs(redis.call('LRANGE', PENDING, 0, -1)) do
    local _, source, target = split(id)
    if redis.call('GETBIT', BITMAP, source) == 0 and redis.call('GETBIT', BITMAP, target) == 0 then
      redis.call('SETBIT', BITMAP, source, 1)
      redis.call('SETBIT', BITMAP, target, 1)
      redis.call('EXPIRE', BITMAP, TTL)
      redis.call('LREM', PENDING, 1, id)
      local payload = redis.call('HGET', WORKFLOW, 'task ' .. id)
      redis.call('HDEL', WORKFLOW, 'task ' .. id)
      grant(id)
      local message = message_of(id, payload)
      push(source, message)
      push(target, message)
    end
  end
end

-- Empties graph.ready. Virtual tasks complete at once, which may make others ready; transfers join the pending list and are
-- granted if both ranks are free; compute tasks are granted last, so that a receiver does not wait for its sender's next
-- computation.
function graph.release(transfer_finished)
  local computes, scan, index = {}, transfer_finished, 1
  while graph.ready[index] do
    local id, payload = graph.ready[index][1], graph.ready[index][2]
    local kind = string.sub(id, 1, 1)
    if kind == 'V' then
      graph.complete(id)
    elseif kind == 'T' then
      redis.call('HSET', WORKFLOW, 'task ' .. id, payload)
      redis.call('RPUSH', PENDING, id)
      redis.call('EXPIRE', PENDING, TTL)
      scan = true
    else
      table.insert(computes, { id, payload })
    end
    index = index + 1
  end
  if scan then
    graph.grant_transfers()
  end
  for _, compute in ipairs(computes) do
    local id, payload = compute[1], compute[2]
    local _, name, rank, seq = split(id)
    grant(id)
    local active = name == 'dec' and redis.call('HGET', WORKFLOW, 'active ' .. seq)
    push(rank, message_of(id, payload, active or nil))
  end
  redis.call('EXPIRE', WORKFLOW, TTL)
  redis.call('EXPIRE', DONE, TTL)
end

-- Reports a granted task done: frees the ranks of a transfer and writes the trace line. Returns whether it was a transfer.
function graph.report(id)
  local kind, source, target = split(id)
  local granted = redis.call('HGET', WORKFLOW, 'granted ' .. id)
  redis.call('HDEL', WORKFLOW, 'granted ' .. id)
  if kind == 'T' then
    redis.call('SETBIT', BITMAP, source, 0)
    redis.call('SETBIT', BITMAP, target, 0)
    redis.call('EXPIRE', BITMAP, TTL)
  end
  if graph.tracing then
    redis.call('RPUSH', TRACE, id .. ' ' .. granted .. ' ' .. now())
    redis.call('EXPIRE', TRACE, TTL)
  end
  return kind == 'T'
end
