-- Store an event and make it due. An event that is there already is not changed.
-- KEYS: event, due (sorted set of ids by the time of the next attempt in ms).
-- ARGV: id, event, time in ms, lifetime of the event in seconds.
-- Returns 1 if the event is new, else 0.
local event, due = unpack(KEYS)
local id, content, at_ms, ttl_s = unpack(ARGV)

if redis.call('SET', event, content, 'NX', 'EX', ttl_s) then
  redis.call('ZADD', due, at_ms, id)
  return 1
end
return 0
