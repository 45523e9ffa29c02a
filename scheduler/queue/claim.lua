-- Lease to a worker the requests of each tier that have the earliest deadlines.
-- ARGV: holder of the leases, name of this claim, now_ms, lease_ms, how busy the worker is (empty: it will not wait), then
-- tier and limit of each tier.
-- Returns {id, payload, fence, attempt, stored output, received, input} of each claimed request, in the order of the
-- tiers. `received` is the number of tokens that its gateway has received: 0 at the first claim, '?' if nobody has told it
-- since the last claim. Only tasks have an input (scheduler/tasks).
-- From now on, the worker waits for the tiers that had fewer requests than their limits, and for no other of these tiers.
-- For what it leaves, the next worker is woken.
-- A worker that has lost the reply sends the same claim again, and gets what it still holds of the same requests.
local worker, name, now_ms, lease_ms = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local load = tonumber(ARGV[5])

local function reply(leases)
  local claimed = {}
  for _, lease in ipairs(leases) do
    local id, fence, received = unpack(lease)
    if holds(id, fence) then
      local fields = redis.call('HMGET', REQUEST .. id, 'payload', 'attempt', 'input')
      claimed[#claimed + 1] = { id, fields[1], tonumber(fence), tonumber(fields[2]), take_output(id), received, fields[3] }
    end
  end
  return claimed
end

local last = redis.call('GET', CLAIM .. worker)
if last then
  last = cjson.decode(last)
  if last.name == name then
    return reply(last.leases)
  end
end

local ids, waits_for = {}, {}
for i = 6, #ARGV, 2 do
  local tier, limit = ARGV[i], tonumber(ARGV[i + 1])
  local popped = redis.call('ZPOPMIN', QUEUE .. tier, limit)
  local left_prompt, left_output, left_bytes = 0, 0, 0
  for j = 1, #popped, 2 do
    local prompt, output, id = read_member(popped[j])
    left_prompt, left_output, left_bytes = left_prompt - prompt, left_output - output, left_bytes - size_of(id)
    if redis.call('EXISTS', REQUEST .. id) == 1 then
      ids[#ids + 1] = id
    end
  end
  if #popped > 0 then
    count_waiting(tier, left_prompt, left_output, left_bytes)
  end
  if load and #popped < 2 * limit then
    waits_for[#waits_for + 1] = tier
  else
    redis.call('ZREM', WAITERS .. tier, id_of(worker))
    if redis.call('EXISTS', QUEUE .. tier) == 1 then
      wake(tier)
    end
  end
end
for _, tier in ipairs(waits_for) do
  redis.call('ZADD', WAITERS .. tier, load + #ids, id_of(worker))
end
if #ids == 0 then
  return {}
end

local first = take_fences(#ids, now_ms)
local expires_ms = string.format('%.0f', now_ms + lease_ms)
local leases = {}
for n, id in ipairs(ids) do
  local key, fence = REQUEST .. id, string.format('%.0f', first + n - 1)
  local received = redis.call('HGET', key, 'received') or '0'
  redis.call('HSET', key, 'fence', fence, 'worker', worker, 'received', '?')
  redis.call('HINCRBY', key, 'attempt', 1)
  redis.call('ZADD', LEASES, expires_ms, id)
  redis.call('SADD', HELD .. id_of(worker), id)
  leases[n] = { id, fence, received }
end
redis.call('SET', CLAIM .. worker, cjson.encode({ name = name, leases = leases }), 'PX', CLAIM_TTL_MS)
return reply(leases)
