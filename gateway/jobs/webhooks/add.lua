-- Store an event and make it due. An event that is there already is not changed.
-- KEYS: event, due (the owner's sorted set of ids by the time of the next attempt in ms), owners (set).
-- ARGV: id, owner, event, time in ms, lifetime of the event in seconds.
-- Returns 1 if the event is new, else 0.
local event, due, owners = unpack(KEYS)
local id, owner, content, at_ms, ttl_s = unpack(ARGV)

if redis.call('SET', event, content, 'NX', 'EX', ttl_s) then
  redis.call('ZADD', due, at_ms, id)
  redis.call('SADD', owners, owner)
  return 1
end
return 0
