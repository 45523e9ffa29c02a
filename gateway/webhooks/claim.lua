-- Take events that are due, for a while: if the caller dies, they are due again when their lease ends.
-- KEYS: due. ARGV: now in ms, end of the lease in ms, most events, prefix of the keys of events.
-- Returns the events.
local due = KEYS[1]
local now_ms, lease_ms, limit, prefix = unpack(ARGV)

local events = {}
for _, id in ipairs(redis.call('ZRANGE', due, '-inf', now_ms, 'BYSCORE', 'LIMIT', 0, limit)) do
  local event = redis.call('GET', prefix .. id)
  if event then
    redis.call('ZADD', due, lease_ms, id)
    table.insert(events, event)
  else
    redis.call('ZREM', due, id)
  end
end
return events
