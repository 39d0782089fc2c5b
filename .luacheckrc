-- For `luacheck lua`. The scripts run inside Redis: Lua 5.1 and the server's globals, which are read-only.
std = "lua51"
max_line_length = 130
read_globals = { "redis", "cjson", "KEYS", "ARGV" }

-- The loader (pipedec/scheduler/scripts.py) puts graph.lua in front of a script that begins with "-- uses: graph", so such
-- a script uses the locals of graph.lua.
local graph = {
  fields = {
    announce = {}, add = {}, complete = {}, report = {}, release = {},
    entries = { read_only = false }, tracing = { read_only = false },
  },
}
files["lua/begin.lua"] = {
  read_globals = { "WORKFLOW", "DONE", "PENDING", "BITMAP", "TRACE", "RUN", "CANCELLED", "NUMBER", graph = graph },
}
files["lua/finish.lua"] = {
  read_globals = { "WORKFLOW", "DONE", "ANSWER", "FIRST_QUEUE", "TTL", "NUMBER", graph = graph },
}
files["lua/graph.lua"] = { ignore = { "211/RUN", "211/ANSWER", "211/CANCELLED" } }
