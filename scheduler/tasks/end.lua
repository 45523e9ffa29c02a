-- End tasks that a worker holds: write their records, and forget their requests.
-- ARGV: now_ms, three limits of dead letters, then of each task: id, fence, state, keep_ms, owner, task, result, error.
-- Returns 1 for each task whose lease was held, else 0. A task that another worker has ended meanwhile stays as it is.
local now_ms, limits = ARGV[1], { tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4]) }
local ended, ids = {}, {}
for i = 5, #ARGV, 8 do
  local id, fence, state, keep_ms, owner, task, result, err = unpack(ARGV, i, i + 7)
  local held = holds(id, fence)
  if held then
    local attempt = redis.call('HGET', REQUEST .. id, 'attempt')
    end_lease(id)
    write_end(id, owner, state, keep_ms, task, attempt, now_ms, result, err, limits)
    ids[#ids + 1] = id
  end
  ended[#ended + 1] = held and 1 or 0
end
announce(ids)
return ended
