-- The token buckets of one API key. Both scripts begin with this file.
-- KEYS: buckets (hash: level of `requests` and `tokens`, and `at_ms`, the time of these levels); open (sorted set: id of
-- each open choice of a request, with the expiry of its lease in ms).
-- ARGV begins with: now in ms; the limits of requests per minute, tokens per minute and open choices (0: no limit).
local buckets, open = KEYS[1], KEYS[2]
local now_ms = tonumber(ARGV[1])
local limits = {requests = tonumber(ARGV[2]), tokens = tonumber(ARGV[3])}
local max_open = tonumber(ARGV[4])

-- The clocks of gateways differ a little, so time may seem to run backwards. If the stored time is farther ahead than a
-- bucket takes to fill, a clock was set back: time goes on from now, or the buckets would not fill until it has caught up.
local stored_ms = tonumber(redis.call('HGET', buckets, 'at_ms') or now_ms)
if stored_ms > now_ms + 60000 then
  stored_ms = now_ms
  redis.call('HSET', buckets, 'at_ms', string.format('%d', now_ms))
end
local at_ms = math.max(now_ms, stored_ms)

-- A bucket holds at most what its limit allows in a minute, and a new one is full. A bucket without limit holds 0. A
-- level is negative after requests that took more tokens than they had reserved.
local function level_of(name)
  local limit, stored = limits[name], redis.call('HGET', buckets, name)
  if limit == 0 or not stored then
    return limit
  end
  local elapsed_ms = at_ms - stored_ms
  return math.min(limit, tonumber(stored) + limit * elapsed_ms / 60000)
end

local level = {requests = level_of('requests'), tokens = level_of('tokens')}

-- Store the levels until both buckets are full again.
local function store()
  local full_ms = 0
  for name, limit in pairs(limits) do
    if limit > 0 then
      level[name] = math.min(limit, level[name])
      full_ms = math.max(full_ms, (limit - level[name]) / limit * 60000)
      redis.call('HSET', buckets, name, string.format('%.3f', level[name]))
    end
  end
  redis.call('HSET', buckets, 'at_ms', string.format('%d', at_ms))
  redis.call('PEXPIRE', buckets, string.format('%d', math.ceil(full_ms) + 1000))
end
