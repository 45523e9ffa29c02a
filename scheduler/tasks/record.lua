-- Functions for the scripts of this folder. They come after the queue's shared.lua, with these key names in front:
-- ENDED, DEAD, NEWS.

local function write_end(id, state, keep_ms, task, attempt, now_ms, result, err)
  redis.call('HSET', ENDED .. id, 'state', state, 'task', task, 'attempt', attempt or 0, 'ended_ms', now_ms,
    'result', result, 'error', err)
  redis.call('PEXPIRE', ENDED .. id, keep_ms)
end

-- Add a dead letter to its owner's index. Remove what has expired or is too much.
local function bury(id, owner, now_ms, ttl_ms, most)
  local dead = DEAD .. owner
  redis.call('ZADD', dead, now_ms, id)
  redis.call('PEXPIRE', dead, ttl_ms)
  redis.call('ZREMRANGEBYSCORE', dead, '-inf', '(' .. string.format('%.0f', now_ms - ttl_ms))
  while redis.call('ZCARD', dead) > most do
    redis.call('DEL', ENDED .. redis.call('ZPOPMIN', dead)[1])
  end
end

local function announce(ids)
  if #ids > 0 then
    redis.call('PUBLISH', NEWS, table.concat(ids, ' '))
  end
end
