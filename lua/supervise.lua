-- supervise.lua
-- Purpose:   renews the lease of a host's supervisor, notes which ranks run on that host, and returns what its decisions need.
-- Invariant: a rank belongs to the node that was the first to run it, until recover.lua gives it to another one.
-- KEYS:      1 run (hash)  2 members (set)  3 doing (hash)  4 suspects (hash)  5 ends (hash)  6 places (hash)
--            7 recoveries (list)  8 nodes (set)  9 lease of this node (string)  10 + rank: alive of that rank (string)
-- ARGV:      1 time to live of the keys in seconds  2 node  3 duration of its lease in milliseconds  4 prefix of the nodes'
--            leases  5 ranks that run there, JSON list
-- Returns:   {{failure, state, epoch, tried}, {rank, ...} with a lease, {rank, ...} whose lease has expired, doing, suspects,
--            ends and places as lists of fields and values, {last recoveries, JSON}, {node whose lease has expired, ...}, the
--            time in microseconds}
if redis.call('HEXISTS', KEYS[1], 'state') == 1 then -- nothing of a run that has ended comes back
  redis.call('SADD', KEYS[8], ARGV[2])
  redis.call('EXPIRE', KEYS[8], ARGV[1])
  redis.call('SET', KEYS[9], '1', 'PX', ARGV[3])
  for _, rank in ipairs(cjson.decode(ARGV[5])) do
    redis.call('HSETNX', KEYS[6], rank, ARGV[2])
  end
  redis.call('EXPIRE', KEYS[6], ARGV[1])
end
local run, alive, expired, lost = {}, {}, {}, {}
for index, field in ipairs({ 'failure', 'state', 'epoch', 'tried' }) do
  run[index] = redis.call('HGET', KEYS[1], field)
end
for _, rank in ipairs(redis.call('SMEMBERS', KEYS[2])) do
  table.insert(redis.call('EXISTS', KEYS[10 + rank]) == 1 and alive or expired, tonumber(rank))
end
for _, node in ipairs(redis.call('SMEMBERS', KEYS[8])) do
  if redis.call('EXISTS', ARGV[4] .. node) == 0 then
    table.insert(lost, node)
  end
end
local hashes, time = {}, redis.call('TIME')
for index = 3, 6 do
  table.insert(hashes, redis.call('HGETALL', KEYS[index]))
end
local now = string.format('%.0f', time[1] * 1000000 + time[2])
return { run, alive, expired, hashes[1], hashes[2], hashes[3], hashes[4], redis.call('LRANGE', KEYS[7], 0, -1), lost, now }
