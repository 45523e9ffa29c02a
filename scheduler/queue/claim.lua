-- Lease to a worker the requests of each tier that have the least scores.
-- ARGV: holder of the leases, name of this claim, now_ms, lease_ms, how busy the worker is (empty: it will not wait), then
-- tier, limit, and how many requests with what greatest score beyond the limit, of each tier.
-- Returns {id, payload, fence, attempt, stored output, received, input} of each claimed request, in the order of the
-- tiers. `received` is the number of tokens that its gateway has received: 0 at the first claim, '?' if nobody has told it
-- since the last claim. Only tasks have an input (scheduler/tasks).
-- From now on, the worker waits for the tiers that had fewer requests than their limits, and for no other of these tiers.
-- For what it leaves, the next worker is woken. Requests for which another worker was woken are left to that one for a
-- while; those that were left to this worker, and are not claimed now, are left to all.
-- A worker that has lost the reply sends the same claim again, and gets what it still holds of the same requests.
local worker, name, now_ms, lease_ms = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local load, worker_id = tonumber(ARGV[5]), id_of(worker)

-- Read all that a claim needs of a request; nil if somebody has removed it. A request that was never claimed, and is no
-- part of a job, has no output.
local function read(id)
  local payload, attempt, input, part, member, received =
    unpack(redis.call('HMGET', REQUEST .. id, 'payload', 'attempt', 'input', 'part', 'member', 'received'))
  if member then
    return { id = id, payload = payload, attempt = tonumber(attempt or 0), input = input, received = received or '0',
      output = (part or attempt) and OUTPUT .. (part or id), number = string.sub(member, 1, 16) }
  end
end

local function row(request, fence)
  local output = request.output and take_output(request.output, request.number)
  return { request.id, request.payload, fence, request.attempt, output, request.received, request.input }
end

-- By tier: how many requests are left to this worker and to others; and the members of the latter.
local mine, left, is_left = {}, {}, {}

-- Read which requests are left to whom (JSON), and forget what is over and what this claim decides.
local function read_left(text)
  local named, kept = {}, {}
  for i = 6, #ARGV, 4 do
    named[ARGV[i]] = true
  end
  for _, entry in ipairs(cjson.decode(text)) do
    local tier, member, whose, until_ms = unpack(entry)
    if until_ms > now_ms and redis.call('ZSCORE', QUEUE .. tier, member) then
      if whose ~= worker_id then
        left[tier], is_left[member] = (left[tier] or 0) + 1, true
      elseif named[tier] then
        mine[tier] = (mine[tier] or 0) + 1
      end
      kept[#kept + 1] = (whose ~= worker_id or not named[tier]) and entry or nil
    end
  end
  if #kept > 0 then
    redis.call('SET', LEFT, cjson.encode(kept), 'PX', LEFT_TTL_MS)
  else
    redis.call('DEL', LEFT)
  end
end

-- Take up to `count` of a tier's requests with the least scores, up to `until_ms`, without those that are left to others.
-- Append their members and scores to `popped`.
local function take(tier, count, until_ms, popped)
  local last = #popped + 2 * count
  local heads = count > 0 and redis.call('ZRANGE', QUEUE .. tier, 0, count + (left[tier] or 0) - 1, 'WITHSCORES') or {}
  for j = 1, #heads, 2 do
    if #popped == last or tonumber(heads[j + 1]) > until_ms then
      break
    end
    if not is_left[heads[j]] then
      redis.call('ZREM', QUEUE .. tier, heads[j])
      popped[#popped + 1], popped[#popped + 2] = heads[j], heads[j + 1]
    end
  end
  return popped
end

-- Return how many of a tier's requests this worker takes if others wait for them: as many as make all equally busy, and
-- those that are left to it.
local function share_of(tier)
  local depth = redis.call('ZCARD', QUEUE .. tier) - (left[tier] or 0)
  local waiters = depth > 1 and redis.call('ZRANGE', WAITERS .. tier, 0, -1, 'WITHSCORES') or {}
  local level, sum, count = load + depth, load, 1
  for i = 1, #waiters, 2 do
    local other = tonumber(waiters[i + 1])
    if other >= level then
      break
    end
    sum, count = sum + other, count + 1
    level = (depth + sum) / count
  end
  return math.max(1, math.ceil(level - load)) + (mine[tier] or 0)
end

local last, epoch, left_to = unpack(redis.call('MGET', CLAIM .. worker, EPOCH, LEFT))
if last and string.sub(last, 1, #name) == name then
  local again = {}
  for _, lease in ipairs(cjson.decode(string.sub(last, #name + 1))) do
    local id, fence, received = unpack(lease)
    if holds(id, fence) then
      local request = read(id)
      request.received = received
      again[#again + 1] = row(request, tonumber(fence))
    end
  end
  return again
end

if left_to then
  read_left(left_to)
end
local requests, waits_for = {}, {}
for i = 6, #ARGV, 4 do
  local tier, limit, due, until_ms = ARGV[i], tonumber(ARGV[i + 1]), tonumber(ARGV[i + 2]), tonumber(ARGV[i + 3])
  local others = limit > 1 and load and redis.call('ZCARD', WAITERS .. tier) or 0
  if others > 0 then
    others = others - redis.call('ZREM', WAITERS .. tier, worker_id)
  end
  local share = others > 0 and math.min(limit, share_of(tier)) or limit
  local popped
  if left[tier] then
    popped = take(tier, share, math.huge, {})
  else
    popped = share > 0 and redis.call('ZPOPMIN', QUEUE .. tier, share) or {}
  end
  local is_empty = others == 0 and not left[tier] and #popped < 2 * limit
  take(tier, is_empty and 0 or due, until_ms, popped)
  local left_prompt, left_output, left_bytes = 0, 0, 0
  for j = 1, #popped, 2 do
    local prompt, output, id = read_member(popped[j])
    local request = read(id)
    left_prompt, left_output = left_prompt - prompt, left_output - output
    if request then
      left_bytes = left_bytes - #request.payload
      requests[#requests + 1] = request
    end
  end
  local leaves
  if #popped > 0 then
    leaves = count_waiting(tier, left_prompt, left_output, left_bytes, is_empty)
  else
    leaves = not is_empty and redis.call('EXISTS', QUEUE .. tier) == 1
  end
  leaves = leaves and (not left[tier] or redis.call('ZCARD', QUEUE .. tier) > left[tier])
  if load and #popped < 2 * (limit + due) then
    waits_for[#waits_for + 1] = tier
    leaves = leaves and #popped > 0 -- or two workers without room would wake each other for ever
  else
    redis.call('ZREM', WAITERS .. tier, worker_id)
  end
  if leaves then
    wake(tier)
  end
end
for _, tier in ipairs(waits_for) do
  redis.call('ZADD', WAITERS .. tier, load + #requests, worker_id)
end
if #requests == 0 then
  return {}
end

local first = take_fences(#requests, now_ms, epoch)
local expires_ms = string.format('%.0f', now_ms + lease_ms)
local ids, scores, leases, rows = {}, {}, {}, {}
for n, request in ipairs(requests) do
  local id, fence = request.id, string.format('%.0f', first + n - 1)
  request.attempt = request.attempt + 1
  redis.call('HSET', REQUEST .. id, 'fence', fence, 'worker', worker, 'received', '?', 'attempt', request.attempt)
  ids[n], scores[2 * n - 1], scores[2 * n] = id, expires_ms, id
  leases[n], rows[n] = { id, fence, request.received }, row(request, first + n - 1)
end
for_members('ZADD', LEASES, scores)
for_members('SADD', HELD .. worker_id, ids)
redis.call('SET', CLAIM .. worker, name .. cjson.encode(leases), 'PX', CLAIM_TTL_MS)
return rows
