-- Cancel a task that waits or runs. What a worker finds for it later is discarded.
-- ARGV: id, owner, now_ms, keep_ms. Returns 1 if the task waited or ran, else 0.
local id, owner, now_ms, keep_ms = unpack(ARGV)
local fields = redis.call('HMGET', REQUEST .. id, 'tier', 'member', 'payload', 'attempt')
local lane, member, task, attempt = unpack(fields)
if not lane then
  return 0
end
end_lease(id)
if redis.call('ZREM', QUEUE .. lane, member) == 1 then
  count_waiting(lane, 0, 0, 0)
end
write_end(id, owner, 'cancelled', keep_ms, task, attempt, now_ms, '', '')
announce({ id })
return 1
