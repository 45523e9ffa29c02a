-- Functions for the scripts of this folder. They come after the queue's shared.lua, with these key names in front:
-- ENDED, DEAD, DEAD_BYTES, BYTES, NEWS.

-- Count bytes of the waiting and running tasks of an owner.
local function count_bytes(owner, change)
  if redis.call('HINCRBY', BYTES, owner, change) <= 0 then
    redis.call('HDEL', BYTES, owner)
  end
end

-- Take a dead letter out of its owner's index. Members of the index are `<id>:<bytes>`.
local function unbury(member, owner)
  if redis.call('ZREM', DEAD .. owner, member) == 1 then
    redis.call('DECRBY', DEAD_BYTES .. owner, string.match(member, ':(%d+)$'))
  end
end

-- Add a dead letter to its owner's index. Remove what has expired or is too much, the oldest first.
local function bury(id, owner, bytes, now_ms, ttl_ms, most, most_bytes)
  local dead, sum = DEAD .. owner, DEAD_BYTES .. owner
  redis.call('ZADD', dead, now_ms, id .. ':' .. bytes)
  redis.call('INCRBY', sum, bytes)
  for _, member in ipairs(redis.call('ZRANGEBYSCORE', dead, '-inf', '(' .. string.format('%.0f', now_ms - ttl_ms))) do
    unbury(member, owner)
  end
  while redis.call('ZCARD', dead) > most or tonumber(redis.call('GET', sum)) > most_bytes do
    local member = redis.call('ZRANGE', dead, 0, 0)[1]
    if not member then
      break
    end
    unbury(member, owner)
    redis.call('DEL', ENDED .. string.match(member, '^(.*):'))
  end
  redis.call('PEXPIRE', dead, ttl_ms)
  redis.call('PEXPIRE', sum, ttl_ms)
end

-- Forget the request of a task that ends, and write the task's record. A dead letter keeps its input for another try.
-- `limits` are those of dead letters: how long they are kept in ms, how many of one owner, and how many bytes of these.
local function write_end(id, owner, state, keep_ms, task, attempt, now_ms, result, err, limits)
  local key, ended = REQUEST .. id, ENDED .. id
  local input, bytes = unpack(redis.call('HMGET', key, 'input', 'bytes'))
  redis.call('DEL', key)
  redis.call('HSET', ended, 'state', state, 'task', task, 'attempt', attempt or 0, 'ended_ms', now_ms,
    'result', result, 'error', err)
  redis.call('PEXPIRE', ended, keep_ms)
  count_bytes(owner, -(bytes or 0))
  if state == 'dead' then
    redis.call('HSET', ended, 'input', input or '', 'bytes', bytes or 0)
    bury(id, owner, bytes or 0, now_ms, unpack(limits))
  end
end

local function announce(ids)
  if #ids > 0 then
    redis.call('PUBLISH', NEWS, table.concat(ids, ' '))
  end
end
