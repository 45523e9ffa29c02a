-- Lease to a worker the requests of each tier that have the earliest deadlines.
-- ARGV: worker id, now_ms, lease_ms, then tier and limit (>= 1) of each tier.
-- Returns {id, payload, fence, attempt, stored output, received, input} of each claimed request, in the order of the
-- tiers. `received` is the number of tokens that its gateway has received: 0 at the first claim, '?' if nobody has told it
-- since the last claim. Only tasks have an input (scheduler/tasks).
local worker, now_ms, lease_ms = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])

local ids = {}
for i = 4, #ARGV, 2 do
  local popped = redis.call('ZPOPMIN', QUEUE .. ARGV[i], ARGV[i + 1])
  local left_prompt, left_output, left_bytes = 0, 0, 0
  for j = 1, #popped, 2 do
    local prompt, output, id = read_member(popped[j])
    left_prompt, left_output, left_bytes = left_prompt - prompt, left_output - output, left_bytes - size_of(id)
    if redis.call('EXISTS', REQUEST .. id) == 1 then
      ids[#ids + 1] = id
    end
  end
  if #popped > 0 then
    count_waiting(ARGV[i], left_prompt, left_output, left_bytes)
  end
end
if #ids == 0 then
  return {}
end

local first = take_numbers(#ids, now_ms)
local expires_ms = string.format('%.0f', now_ms + lease_ms)
local claimed = {}
for n, id in ipairs(ids) do
  local key, fence = REQUEST .. id, first + n - 1
  redis.call('ZADD', LEASES, expires_ms, id)
  local fields = redis.call('HMGET', key, 'payload', 'received', 'input')
  redis.call('HSET', key, 'fence', string.format('%.0f', fence), 'worker', worker, 'received', '?')
  local attempt = redis.call('HINCRBY', key, 'attempt', 1)
  claimed[n] = { id, fields[1], fence, attempt, take_output(id), fields[2] or '0', fields[3] }
end
return claimed
