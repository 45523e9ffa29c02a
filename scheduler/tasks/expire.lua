-- End tasks that wait: write their records as dead letters, and forget their requests. Those that run go on.
-- ARGV: now_ms, three limits of dead letters, then of each task: id, owner, error.
local now_ms, limits = ARGV[1], { tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4]) }
local ids = {}
for i = 5, #ARGV, 3 do
  local id, owner, err = unpack(ARGV, i, i + 2)
  local fields = redis.call('HMGET', REQUEST .. id, 'tier', 'member', 'payload', 'attempt', 'fence')
  local lane, member, task, attempt, fence = unpack(fields)
  if lane and not fence then
    redis.call('ZREM', QUEUE .. lane, member)
    count_waiting(lane, 0, 0, 0)
    write_end(id, owner, 'dead', limits[1], task, attempt, now_ms, '', err, limits)
    ids[#ids + 1] = id
  end
end
announce(ids)
