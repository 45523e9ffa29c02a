-- Enqueue all of some requests or none.
-- ARGV: tier, limit (-1: none), now_ms, then id, deadline_ms, payload of each.
-- Returns -1, or the tier's depth if the requests that are not known yet would exceed the limit.
local tier, limit, now_ms = ARGV[1], tonumber(ARGV[2]), ARGV[3]
local queue = QUEUE .. tier

local fresh, seen = {}, {}
for i = 4, #ARGV, 3 do
  local id = ARGV[i]
  if not seen[id] and redis.call('EXISTS', REQUEST .. id) == 0 then
    fresh[#fresh + 1] = i
  end
  seen[id] = true
end
if #fresh == 0 then
  return -1
end

local depth = redis.call('ZCARD', queue)
if limit >= 0 and depth + #fresh > limit then
  return depth
end

local first = take_numbers(#fresh, now_ms)
for n, i in ipairs(fresh) do
  local id, deadline_ms, payload = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  local member = string.format('%016.0f:', first + n - 1) .. id
  redis.call('HSET', REQUEST .. id, 'tier', tier, 'member', member, 'deadline_ms', deadline_ms, 'payload', payload)
  redis.call('ZADD', queue, deadline_ms, member)
end
redis.call('PUBLISH', WAKE, 'wake')
return -1
