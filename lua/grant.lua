-- grant.lua: the order of the transfers between two timesteps. Not a script of its own: shared by begin.lua and finish.lua.
-- Purpose:   works out, from the groups of stages and the duplex of their links, in which phases the transfers run with which a
--            timestep ends, and gives each rank its own ones.
-- Invariant: no rank takes part in two transfers of a phase that conflict: with half duplex in two at all (the paper's
--            Algorithm 2), with full duplex in two that it sends or two that it receives. The last stage's result comes first:
--            what rank 0 sends next depends on it.
local grant = {}

-- The transfers, the result first and then from the last group to the first: {{source, target}, ...}.
-- groups: first and last stage of each group, as "1-2 3-3 4-6".
local function transfers(groups)
  local ordered, source = {}, 0
  for first, last in string.gmatch(groups, '(%d+)%-(%d+)') do
    table.insert(ordered, 1, { source, tonumber(first) })
    source = tonumber(last)
  end
  table.insert(ordered, 1, { source, 0 })
  return ordered
end

-- Whether the transfer may join the phase in which these ranks send and receive.
local function is_free(transfer, sending, receiving, duplex)
  local source, target = transfer[1], transfer[2]
  if duplex == 'half' and (receiving[source] or sending[target]) then
    return false
  end
  return not sending[source] and not receiving[target]
end

-- The phases, each a list of transfers: every transfer runs in the first phase in which its two ranks are free.
local function phases(groups, duplex)
  local planned, pending = {}, transfers(groups)
  while #pending > 0 do
    local phase, waiting, sending, receiving = {}, {}, {}, {}
    for _, transfer in ipairs(pending) do
      if is_free(transfer, sending, receiving, duplex) then
        sending[transfer[1]], receiving[transfer[2]] = true, true
        table.insert(phase, transfer)
      else
        table.insert(waiting, transfer)
      end
    end
    table.insert(planned, phase)
    pending = waiting
  end
  return planned
end

-- The transfers of one rank, phase by phase without the phases in which it has none, as JSON: [[[source, target], ...], ...].
function grant.transfers_of(rank, groups, duplex)
  local own = {}
  for _, phase in ipairs(phases(groups, duplex)) do
    local texts = {}
    for _, transfer in ipairs(phase) do
      if transfer[1] == rank or transfer[2] == rank then
        table.insert(texts, '[' .. transfer[1] .. ',' .. transfer[2] .. ']')
      end
    end
    if #texts > 0 then
      table.insert(own, '[' .. table.concat(texts, ',') .. ']')
    end
  end
  return '[' .. table.concat(own, ',') .. ']'
end
