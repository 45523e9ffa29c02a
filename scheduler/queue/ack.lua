-- Forget finished requests.
-- ARGV: id and fence of each lease. Returns 1 for each lease that was held, else 0.
local done, ended = {}, {}
for i = 1, #ARGV, 2 do
  local id = ARGV[i]
  local fence, holder, part, member = unpack(redis.call('HMGET', REQUEST .. id, 'fence', 'worker', 'part', 'member'))
  local held = fence == ARGV[i + 1]
  if held then
    ended[holder] = ended[holder] or {}
    table.insert(ended[holder], id)
    forget(id, part, member)
  end
  done[#done + 1] = held and 1 or 0
end
for holder, ids in pairs(ended) do
  for_members('SREM', HELD .. id_of(holder), ids)
  for_members('ZREM', LEASES, ids)
end
return done
