-- Forget requests, whether they wait or are leased. ARGV: ids. Returns 1 for each known id, else 0.
local known = {}
for i, id in ipairs(ARGV) do
  local tier, member, part = unpack(redis.call('HMGET', REQUEST .. id, 'tier', 'member', 'part'))
  local bytes, holder = size_of(id), end_lease(id)
  if tier then
    forget(id, part, member)
    if redis.call('ZREM', QUEUE .. tier, member) == 1 then
      local prompt, output = read_member(member)
      count_waiting(tier, 0 - prompt, 0 - output, 0 - bytes)
    end
    if holder then
      redis.call('PUBLISH', WAKE .. id_of(holder), 'cancel:' .. id)
    end
  end
  known[i] = tier and 1 or 0
end
return known
