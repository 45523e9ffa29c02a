-- Take events that are due, for a while: if the caller dies, they are due again when their lease ends. The next event is
-- always one of an owner with the fewest in delivery, so that no owner waits for the slow receivers of another.
-- KEYS: owners (set). ARGV: now in ms, end of the lease in ms, most events, most events of an owner in delivery, prefix of
--   the keys of events, prefix of the owners' sorted sets, then of each owner with events in delivery: name, number.
-- Returns the events.
local owners = KEYS[1]
local now_ms, lease_ms, limit, most, event_prefix, due_prefix = unpack(ARGV)
local held = {}
for i = 7, #ARGV, 2 do
  held[ARGV[i]] = tonumber(ARGV[i + 1])
end

local waiting = {}
for _, owner in ipairs(redis.call('SMEMBERS', owners)) do
  local due, room = due_prefix .. owner, math.min(limit, most - (held[owner] or 0))
  local ids = {}
  if room > 0 then
    ids = redis.call('ZRANGE', due, '-inf', now_ms, 'BYSCORE', 'LIMIT', 0, room)
  end
  if #ids > 0 then
    waiting[#waiting + 1] = { due = due, ids = ids, next = 1, held = held[owner] or 0 }
  elseif redis.call('EXISTS', due) == 0 then
    redis.call('SREM', owners, owner)
  end
end

local events = {}
while #events < tonumber(limit) do
  local first
  for _, owner in ipairs(waiting) do
    if owner.next <= #owner.ids and (not first or owner.held < first.held) then
      first = owner
    end
  end
  if not first then
    break
  end
  local id = first.ids[first.next]
  local event = redis.call('GET', event_prefix .. id)
  first.next = first.next + 1
  if event then
    first.held = first.held + 1
    redis.call('ZADD', first.due, lease_ms, id)
    events[#events + 1] = event
  else
    redis.call('ZREM', first.due, id)
  end
end
return events
