-- Enqueue a dead letter again, with all its tries before it.
-- ARGV: id, owner, tier, arrival_ms, task, now_ms. Returns 1 if it was a dead letter, else 0.
local id, owner, tier, arrival_ms, task, now_ms = unpack(ARGV)
if redis.call('HGET', ENDED .. id, 'state') ~= 'dead' then
  return 0
end
redis.call('DEL', ENDED .. id)
redis.call('ZREM', DEAD .. owner, id)
local member = make_member(take_numbers(1, now_ms), 0, 0, id)
redis.call('HSET', REQUEST .. id, 'tier', tier, 'member', member, 'deadline_ms', arrival_ms, 'payload', task)
redis.call('ZADD', QUEUE .. tier, arrival_ms, member)
count_tokens(tier, 0, 0)
redis.call('PUBLISH', WAKE, 'wake')
return 1
