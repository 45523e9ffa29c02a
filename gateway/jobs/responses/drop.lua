-- Functions for the other scripts, with these names of keys in front: RECORD, EVENTS, OF, SIZES, BYTES. The store must
-- be one server, not a cluster, because keys are made from ids here.

-- Count the size of a response; 0 forgets it.
local function set_size(id, owner, size)
  local old = redis.call('HGET', SIZES, id) or 0
  if size > 0 then
    redis.call('HSET', SIZES, id, size)
  else
    redis.call('HDEL', SIZES, id)
  end
  if redis.call('HINCRBY', BYTES, owner, size - old) <= 0 then
    redis.call('HDEL', BYTES, owner)
  end
end

-- Remove a response with all that belongs to it.
local function drop(id, owner)
  redis.call('DEL', RECORD .. id, EVENTS .. id)
  redis.call('ZREM', OF .. owner, id)
  set_size(id, owner, 0)
end

local function is_running(record)
  local status = redis.call('HGET', record, 'status')
  return status == 'queued' or status == 'in_progress'
end
