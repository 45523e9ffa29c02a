-- A function for the other scripts: remove a response with all that belongs to it.
-- The store must be one server, not a cluster, because the keys of a response are made from its id here.
local function drop(id, expiry, sizes, total)
  redis.call('DEL', 'tidegate:response:' .. id, 'tidegate:response:events:' .. id)
  redis.call('ZREM', expiry, id)
  local size = redis.call('HGET', sizes, id)
  if size then
    redis.call('HDEL', sizes, id)
    redis.call('DECRBY', total, size)
  end
end

local function is_running(record)
  local status = redis.call('HGET', record, 'status')
  return status == 'queued' or status == 'in_progress'
end
