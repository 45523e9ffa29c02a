-- Cancel a task that waits or runs. What a worker finds for it later is discarded.
-- ARGV: id, now_ms, keep_ms. Returns 1 if the task waited or ran, else 0.
local id, now_ms, keep_ms = unpack(ARGV)
local key = REQUEST .. id
local lane, member, task, attempt = unpack(redis.call('HMGET', key, 'tier', 'member', 'payload', 'attempt'))
if not lane then
  return 0
end
redis.call('ZREM', LEASES, id)
if redis.call('ZREM', QUEUE .. lane, member) == 1 then
  count_tokens(lane, 0, 0)
end
redis.call('DEL', key)
write_end(id, 'cancelled', keep_ms, task, attempt, now_ms, '', '')
announce({ id })
return 1
