-- graph.lua: the task graph of a workflow. Not a script of its own: shared by begin.lua and finish.lua; the loader puts it
-- in front of every script that names it in its first line ("-- uses: ...").
-- Purpose:   adds tasks with their dependencies, completes tasks, releases the tasks that waited for them, and grants
--            transfers without conflict (the paper's Algorithm 2).
-- Invariant: a task is granted once, after all its dependencies are done; a rank takes part in at most one granted transfer.
-- KEYS:      1 workflow (hash)  2 done (zset)  3 pending (list)  4 bitmap (string)  5 trace (list)  6 run (hash)
--            7 running (set)  8 cancelled (set)  9 unread (set)  10 + rank: queue of that rank (list)
-- ARGV:      1 time to live of the keys in seconds  2 number of the workflow
local WORKFLOW, DONE, PENDING, BITMAP, TRACE, RUN = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local RUNNING, CANCELLED, UNREAD, FIRST_QUEUE = KEYS[7], KEYS[8], KEYS[9], 10
local TTL, NUMBER = ARGV[1], ARGV[2]

local graph = { ready = {}, entries = '', trace_lines = 0 }

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
function graph.add(planned)
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
  if kind == 'C' and name == 'sync' and redis.call('SISMEMBER', CANCELLED, NUMBER) == 1 then
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

-- more: further members of the JSON object.
local function message_of(id, payload, more)
  return '{"kind":"task","number":' .. NUMBER .. ',"task":"' .. id .. '"' .. (more or '') .. ',"payload":' .. payload .. '}'
end

local function mark_granted(id)
  redis.call('HSET', WORKFLOW, 'granted ' .. id, graph.trace_lines > 0 and now() or '0')
end

-- What a compute task is granted with beside its payload: a dec with the active entry ranks, a window with the order of its
-- rank's transfers.
local function terms(name, rank, seq)
  if name == 'dec' then
    return ',"active":[' .. (redis.call('HGET', WORKFLOW, 'active ' .. seq) or '') .. ']'
  end
  if name == 'window' then
    local links = redis.call('HMGET', RUN, 'groups', 'duplex')
    return ',"transfers":' .. grant.transfers_of(tonumber(rank), links[1], links[2])
  end
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
      mark_granted(id)
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
    mark_granted(id)
    push(rank, message_of(id, payload, terms(name, rank, seq)))
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
  if graph.trace_lines > 0 then
    redis.call('RPUSH', TRACE, id .. ' ' .. granted .. ' ' .. now())
    redis.call('LTRIM', TRACE, -graph.trace_lines, -1)
    redis.call('EXPIRE', TRACE, TTL)
  end
  return kind == 'T'
end
