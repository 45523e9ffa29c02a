-- Enqueue a dead letter again, with all its tries before it.
-- ARGV: id, owner, tier, arrival_ms, task, now_ms, maximum of bytes that the owner's tasks may have.
-- Returns {} if it was a dead letter, {'none'} if it was not, or {'bytes', held} if the owner would have too many.
local id, owner, tier, arrival_ms, task, now_ms, max_bytes = unpack(ARGV)
local state, input, bytes = unpack(redis.call('HMGET', ENDED .. id, 'state', 'input', 'bytes'))
if state ~= 'dead' then
  return { 'none' }
end
local held = tonumber(redis.call('HGET', BYTES, owner) or 0)
if held + bytes > tonumber(max_bytes) then
  return { 'bytes', held }
end
redis.call('DEL', ENDED .. id)
unbury(id .. ':' .. bytes, owner)
count_bytes(owner, bytes)
local member = make_member(take_numbers(1, now_ms), 0, 0, id)
redis.call('HSET', REQUEST .. id, 'tier', tier, 'member', member, 'deadline_ms', arrival_ms, 'payload', task,
  'input', input, 'bytes', bytes)
redis.call('ZADD', QUEUE .. tier, arrival_ms, member)
count_waiting(tier, 0, 0, 0)
wake(tier)
return {}
