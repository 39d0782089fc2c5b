-- leave.lua
-- Purpose:   gives up the lease of a rank that exits normally.
-- Invariant: a rank that has left is neither a member nor expired.
-- KEYS:      1 members (set)  2 alive of this rank (string)
-- ARGV:      1 rank
-- Returns:   1
redis.call('SREM', KEYS[1], ARGV[1])
redis.call('DEL', KEYS[2])
return 1
