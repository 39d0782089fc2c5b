-- answers.lua: writes events to answers. Not a script of its own: shared by the scripts that name it in their first line.
-- Purpose:   appends an event to the answer of a request.
-- Invariant: an answer that its reader has closed is not written any more, so that no key is left without a reader.
local answers = {}

-- unread: key of the set of unfinished requests whose answers were closed.
function answers.append(answer, unread, number, event, seconds)
  if redis.call('SISMEMBER', unread, number) == 0 then
    redis.call('XADD', answer, 'MAXLEN', '~', 16384, '*', 'event', event)
    redis.call('EXPIRE', answer, seconds)
  end
end
