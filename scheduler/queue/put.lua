-- Enqueue all of the given requests, or none of them.
-- ARGV: tier, limit (-1: no limit), now_ms;
--   the limits of the work ahead: requests, seconds; seconds per prompt token, seconds per output token;
--   maximum of bytes that may wait (-1: any number); preferred workers (JSON: until_ms, slack, their ids; empty: none);
--   number of tiers above, their names;
--   then, for each request: id, deadline_ms, prompt tokens, output tokens, payload, part of a job (empty: of none),
--   the gateway that waits for it (empty: none).
-- Returns an empty list if the requests are enqueued;
-- {'full', depth} if the requests that are not known yet would exceed the limit;
-- {'large', depth, bytes} if they would have too many bytes with those that wait;
-- {'behind', requests, prompt tokens, output tokens} if more work waits ahead than allowed.
local tier, limit, now_ms = ARGV[1], tonumber(ARGV[2]), ARGV[3]
local max_ahead, max_s, prompt_s, output_s = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
local max_bytes, prefer, num_above = tonumber(ARGV[8]), ARGV[9], tonumber(ARGV[10])
local queue, first_request = QUEUE .. tier, 11 + num_above

local fresh, seen = {}, {}
local fresh_bytes = 0
for i = first_request, #ARGV, 7 do
  local id = ARGV[i]
  if not seen[id] and redis.call('EXISTS', REQUEST .. id) == 0 then
    fresh[#fresh + 1] = i
    fresh_bytes = fresh_bytes + #ARGV[i + 4]
  end
  seen[id] = true
end
if #fresh == 0 then
  return {}
end

local depth = redis.call('ZCARD', queue)
if limit >= 0 and depth + #fresh > limit then
  return { 'full', depth }
end
local sum_prompt, sum_output, bytes, woken_ms = waiting(tier, depth)
if max_bytes >= 0 and depth > 0 and bytes + fresh_bytes > max_bytes then
  return { 'large', depth, bytes }
end

-- The work ahead is the requests of the same tier that are due no later, and all requests of the tiers above. In the
-- same tier, the tokens of the requests ahead are estimated: their share of the tier's requests, times the tier's
-- tokens. Nothing is counted where all that waits is no more than may be ahead.
local above_prompt, above_output = 0, 0
for i = 11, 10 + num_above do
  local prompt, output = waiting(ARGV[i], redis.call('ZCARD', QUEUE .. ARGV[i]))
  above_prompt, above_output = above_prompt + prompt, above_output + output
end
local function is_too_much(ahead, prompt, output)
  return ahead > max_ahead or prompt * prompt_s + output * output_s > max_s
end
if is_too_much(depth, above_prompt + sum_prompt, above_output + sum_output) then
  local ahead, prompt, output = 0, above_prompt, above_output
  if depth > 0 then
    local latest_ms = 0
    for _, i in ipairs(fresh) do
      latest_ms = math.max(latest_ms, ARGV[i + 1])
    end
    ahead = redis.call('ZCOUNT', queue, '-inf', latest_ms)
    prompt = prompt + math.floor(sum_prompt * ahead / depth)
    output = output + math.floor(sum_output * ahead / depth)
  end
  if is_too_much(ahead, prompt, output) then
    return { 'behind', ahead, prompt, output }
  end
end

-- Return how busy a worker is that waits for the tier, or that was woken for requests and has not claimed them yet; nil for
-- any other.
local function load_of(worker, left)
  local load = redis.call('ZSCORE', WAITERS .. tier, worker)
  for n = load and 0 or #left, 1, -1 do
    local of_tier, _, whose, until_ms, load_before = unpack(left[n])
    if whose == worker and of_tier == tier and until_ms > tonumber(now_ms) then
      return load_before + 1
    end
  end
  return tonumber(load)
end

-- Wake the least busy preferred worker. Return its id and how busy it is; nil if there is none, if all are too busy beside
-- the least busy worker that waits (0 if none does), or if the worker has ended.
local function wake_preferred(left)
  local chosen
  local most = (redis.call('ZRANGE', WAITERS .. tier, 0, 0, 'WITHSCORES')[2] or 0) + prefer[2]
  for n = 3, #prefer do
    local load = load_of(prefer[n], left)
    if load and load <= most then
      chosen, most = prefer[n], load - 0.5 -- of those that are equally busy, the first
    end
  end
  if not chosen then
    return
  end
  redis.call('ZREM', WAITERS .. tier, chosen)
  if redis.call('PUBLISH', WAKE .. chosen, 'wake') > 0 then
    return chosen, most + 0.5
  end
end

local first, members = take_numbers(#fresh, now_ms), {}
for n, i in ipairs(fresh) do
  local id, deadline_ms, payload, part = ARGV[i], ARGV[i + 1], ARGV[i + 4], ARGV[i + 5]
  local member = make_member(first + n - 1, ARGV[i + 2], ARGV[i + 3], id)
  local fields = { 'tier', tier, 'member', member, 'deadline_ms', deadline_ms, 'payload', payload, 'reply_to', ARGV[i + 6] }
  if part ~= '' then
    fields[#fields + 1], fields[#fields + 2] = 'part', part
    redis.call('PEXPIRE', OUTPUT .. part, OUTPUT_TTL_MS) -- it may wait for long
  end
  redis.call('HSET', REQUEST .. id, unpack(fields))
  redis.call('ZADD', queue, deadline_ms, member)
  members[n] = member
  sum_prompt, sum_output = sum_prompt + ARGV[i + 2], sum_output + ARGV[i + 3]
end

-- A worker that was woken in the last moment is about to claim these requests, too. One that does not react in time is not
-- waited for.
local since_ms = now_ms - woken_ms
local left, chosen, load
if prefer ~= '' then
  prefer, left = cjson.decode(prefer), cjson.decode(redis.call('GET', LEFT) or '[]')
  chosen, load = wake_preferred(left)
end
local wakes = not chosen and (since_ms < 0 or since_ms >= WAKE_MS)
redis.call('HSET', WAITING .. tier, 'prompt', sum_prompt, 'output', sum_output, 'bytes', bytes + fresh_bytes,
  'woken_ms', wakes and now_ms or woken_ms)
if wakes then
  wake(tier)
elseif chosen then
  for n, member in ipairs(members) do
    left[#left + 1] = { tier, member, chosen, prefer[1], load + n - 1 }
  end
  redis.call('SET', LEFT, cjson.encode(left), 'PX', LEFT_TTL_MS)
end
return {}
