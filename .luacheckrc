-- For `luacheck lua`. The scripts run inside Redis: Lua 5.1 and the server's globals, which are read-only.
std = "lua51"
max_line_length = 130
read_globals = { "redis", "cjson", "KEYS", "ARGV" }

-- The loader (pipedec/scheduler/scripts.py) puts shared files in front of a script that names them in its first line
-- ("-- uses: grant graph"), so such a script uses their locals.
local grant = { fields = { transfers_of = {} } }
local fence = { fields = { refusal = {} } }
local answers = { fields = { append = {} } }
local graph = {
  fields = {
    announce = {}, add = {}, complete = {}, report = {}, release = {},
    entries = { read_only = false }, trace_lines = { read_only = false },
  },
}
files["lua/begin.lua"] = {
  read_globals = { "WORKFLOW", "DONE", "PENDING", "BITMAP", "TRACE", "RUN", "NUMBER", graph = graph, fence = fence },
}
files["lua/finish.lua"] = {
  read_globals = {
    "WORKFLOW", "DONE", "RUN", "RUNNING", "UNREAD", "FIRST_QUEUE", "TTL", "NUMBER", graph = graph, answers = answers, fence = fence,
  },
}
for _, script in ipairs({ "publish", "cancel", "abort" }) do
  files["lua/" .. script .. ".lua"] = { read_globals = { answers = answers, fence = fence } }
end
files["lua/graph.lua"] = { ignore = { "211/RUNNING", "211/UNREAD" }, read_globals = { grant = grant } }
files["lua/grant.lua"] = { ignore = { "241/grant" } }
files["lua/answers.lua"] = { ignore = { "241/answers" } }
for _, script in ipairs({ "blame", "lease", "leave", "note", "open", "orphans", "recover", "stop", "take", "try" }) do
  files["lua/" .. script .. ".lua"] = { read_globals = { fence = fence } }
end
files["lua/fence.lua"] = { ignore = { "241/fence" } }
