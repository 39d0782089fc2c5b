-- graph.lua: the task graph of a workflow. Not a script of its own: shared by begin.lua and finish.lua; the loader puts it
-- in front of every script that names it in its first line ("-- uses: ...").
-- Purpose:   adds tasks with their dependencies, completes tasks, and grants those that are ready, transfers without conflict
--            (the paper's Algorithm 2). A rank gets all that it may do in a row in one message, in the order in which it does it.
-- Invariant: a task is granted once: when each of its dependencies is done, or has been granted before it to one of its own
--            ranks. All ranks get the tasks that they share in the same order, so they never wait for each other in a circle.
-- KEYS:      1 workflow (hash)  2 done (zset)  3 trace (list)  4 run (hash)  5 + rank: queue of that rank (list)
-- ARGV:      1 time to live of the keys in seconds  2 number of the workflow
local WORKFLOW, DONE, TRACE, RUN, FIRST_QUEUE = KEYS[1], KEYS[2], KEYS[3], KEYS[4], 5
local TTL, NUMBER = ARGV[1], ARGV[2]

-- granted: by rank, the tasks of its message. promised: by task, how many of its dependencies have been granted before it.
local graph = { ready = {}, granted = {}, promised = {}, entries = '', trace_lines = 0 }

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
  if unmet == 0 then
    table.insert(graph.ready, { id, payload })
  else
    redis.call('HSET', WORKFLOW, 'task ' .. id, payload, 'unmet ' .. id, unmet)
  end
end

local function make_ready(id)
  table.insert(graph.ready, { id, redis.call('HGET', WORKFLOW, 'task ' .. id) })
  redis.call('HDEL', WORKFLOW, 'task ' .. id, 'unmet ' .. id)
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
      local waits = redis.call('HEXISTS', WORKFLOW, 'unmet ' .. other) == 1 -- it may be granted already
      if waits and redis.call('HINCRBY', WORKFLOW, 'unmet ' .. other, -1) == 0 then
        make_ready(other)
      end
    end
  end
  if kind == 'V' and target == 'all' then -- the barrier: no later task depends on earlier timesteps
    redis.call('ZREMRANGEBYSCORE', DONE, '-inf', seq - 1)
    redis.call('HDEL', WORKFLOW, 'active ' .. seq)
  end
end

-- What comes with a granted compute task beside its payload: the active entry ranks with a dec, the order of its rank's transfers
-- with a window.
local function terms(name, rank, seq)
  if name == 'dec' then
    return ',"active":[' .. (redis.call('HGET', WORKFLOW, 'active ' .. seq) or '') .. ']'
  end
  if name == 'window' then
    local links = redis.call('HMGET', RUN, 'groups', 'duplex')
    return ',"transfers":' .. grant.transfers_of(tonumber(rank), links[1], links[2])
  end
  return ''
end

local function grant_to(rank, text)
  graph.granted[rank] = graph.granted[rank] and (graph.granted[rank] .. ',' .. text) or text
end

-- Grants a task. A task that depends on it then becomes ready, too, if all its other dependencies are done or have been granted
-- in the same way, and the rank that ends this one takes part in it.
local function grant_task(id, payload)
  local kind, name, target, seq = split(id)
  redis.call('HSET', WORKFLOW, 'granted ' .. id, graph.trace_lines > 0 and now() or '0')
  if kind == 'T' then
    local text = '{"task":"' .. id .. '"}'
    grant_to(name, text)
    grant_to(target, text)
  else
    grant_to(target, '{"task":"' .. id .. '","payload":' .. payload .. terms(name, target, seq) .. '}')
  end
  for other in string.gmatch(redis.call('HGET', WORKFLOW, 'next ' .. id) or '', '%S+') do
    local of_kind, source, of_rank = split(other)
    if of_kind ~= 'V' and (of_rank == target or (of_kind == 'T' and source == target)) then
      graph.promised[other] = (graph.promised[other] or 0) + 1
      if redis.call('HGET', WORKFLOW, 'unmet ' .. other) == tostring(graph.promised[other]) then
        make_ready(other)
      end
    end
  end
end

-- Algorithm 2, lines 9 to 17, again until nothing is pending: in order of arrival, the transfers whose two ranks are both free.
-- Each round begins with a free bitmap: a rank does what it is granted one after another.
local function grant_transfers(pending)
  while #pending > 0 do
    local bitmap, waiting = {}, {}
    for _, task in ipairs(pending) do
      local _, source, target = split(task[1])
      if bitmap[source] or bitmap[target] then
        table.insert(waiting, task)
      else
        bitmap[source], bitmap[target] = true, true
        grant_task(task[1], task[2])
      end
    end
    pending = waiting
  end
end

-- Empties graph.ready. Virtual tasks complete at once, which may make others ready. Transfers are granted before computations, so
-- that a receiver does not wait for its sender's next computation. Then every rank gets its message.
function graph.release()
  while #graph.ready > 0 do
    local computes, transfers, index = {}, {}, 1
    while graph.ready[index] do
      local task = graph.ready[index]
      local kind = string.sub(task[1], 1, 1)
      if kind == 'V' then
        graph.complete(task[1])
      else
        table.insert(kind == 'T' and transfers or computes, task)
      end
      index = index + 1
    end
    graph.ready = {}
    grant_transfers(transfers)
    for _, task in ipairs(computes) do
      grant_task(task[1], task[2])
    end
  end
  for rank, tasks in pairs(graph.granted) do
    local queue = KEYS[FIRST_QUEUE + rank]
    redis.call('RPUSH', queue, '{"kind":"tasks","number":' .. NUMBER .. ',"tasks":[' .. tasks .. ']}')
    redis.call('EXPIRE', queue, TTL)
  end
  redis.call('EXPIRE', WORKFLOW, TTL)
  redis.call('EXPIRE', DONE, TTL)
end

-- Reports a granted task done and writes its trace line.
function graph.report(id, granted)
  redis.call('HDEL', WORKFLOW, 'granted ' .. id)
  if graph.trace_lines > 0 and granted ~= '0' then -- 0: it was granted before there was a trace
    redis.call('RPUSH', TRACE, id .. ' ' .. granted .. ' ' .. now())
    redis.call('LTRIM', TRACE, -graph.trace_lines, -1)
    redis.call('EXPIRE', TRACE, TTL)
  end
end
