-- Forget requests, whether they wait or are leased. ARGV: ids. Returns 1 for each known id, else 0.
local known = {}
for i, id in ipairs(ARGV) do
  local key = REQUEST .. id
  local fields, bytes = redis.call('HMGET', key, 'tier', 'member'), size_of(id)
  if fields[1] then
    local holder = forget(id)
    if redis.call('ZREM', QUEUE .. fields[1], fields[2]) == 1 then
      local prompt, output = read_member(fields[2])
      count_waiting(fields[1], 0 - prompt, 0 - output, 0 - bytes)
    end
    if holder then
      redis.call('PUBLISH', WAKE .. id_of(holder), 'cancel:' .. id)
    end
  end
  known[i] = fields[1] and 1 or 0
end
return known
