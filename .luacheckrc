-- For `luacheck lua`. Scripts run inside Redis: Lua 5.1 with the server's own globals, none of which may be set.
std = "lua51"
max_line_length = 130
read_globals = { "redis", "cjson", "KEYS", "ARGV" }
