-- room.lua: makes sure that there is memory. Not a script of its own: shared by the scripts that name it in their first line.
-- Purpose:   stops a script that begins by removing something, where Redis would refuse what it writes afterwards.
-- Invariant: nothing is changed: a string is written to that is as empty as before.
redis.call('SETRANGE', KEYS[1] .. ':room', 0, '')
