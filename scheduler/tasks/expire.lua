-- End tasks that wait: write their records as dead letters, and forget their requests. Those that run go on.
-- ARGV: now_ms, dead_ttl_ms, max_dead, then of each task: id, owner, error.
local now_ms, dead_ttl_ms, max_dead = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local ids = {}
for i = 4, #ARGV, 3 do
  local id, owner, err = unpack(ARGV, i, i + 2)
  local key = REQUEST .. id
  local fields = redis.call('HMGET', key, 'tier', 'member', 'payload', 'attempt', 'fence')
  local lane, member, task, attempt, fence = unpack(fields)
  if lane and not fence then
    redis.call('ZREM', QUEUE .. lane, member)
    count_tokens(lane, 0, 0)
    redis.call('DEL', key)
    write_end(id, 'dead', dead_ttl_ms, task, attempt, now_ms, '', err)
    bury(id, owner, now_ms, dead_ttl_ms, max_dead)
    ids[#ids + 1] = id
  end
end
announce(ids)
