-- wake.lua
-- Purpose:   lets a front-end's reader of answers return, because it has submitted another request.
-- Invariant: the stream lives no longer than the front-end's lease, and has one entry at most.
-- KEYS:      1 stream of the front-end that wakes its reader
-- ARGV:      1 duration of the lease in milliseconds
-- Returns:   1
redis.call('XADD', KEYS[1], 'MAXLEN', 1, '*', 'wake', '')
redis.call('PEXPIRE', KEYS[1], ARGV[1])
return 1
