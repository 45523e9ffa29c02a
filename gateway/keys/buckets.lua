-- The token buckets of an API key or a project. Both scripts begin with this file.
-- KEYS: pairs for each holder: buckets (hash: level of `requests` and `tokens`, and `at_ms`, the time of these levels);
-- open (sorted set: id of each open choice of a request, with the expiry of its lease in ms).
-- ARGV[1] is the call as JSON: now_ms, and `holders` in the order of KEYS: the limits of requests per minute, tokens per
-- minute and open choices of each (0: no limit).
local call = cjson.decode(ARGV[1])
local now_ms = call.now_ms

-- Return a holder with its levels at present.
local function read(limits, buckets, open)
  local holder = {limits = {requests = limits.requests, tokens = limits.tokens}, buckets = buckets, open = open}
  -- The clocks of gateways differ a little, so time may seem to run backwards. If the stored time is farther ahead than
  -- a bucket takes to fill, a clock was set back: time goes on from now, or the buckets would not fill until it has
  -- caught up.
  local stored_ms = tonumber(redis.call('HGET', buckets, 'at_ms') or now_ms)
  if stored_ms > now_ms + 60000 then
    stored_ms = now_ms
    redis.call('HSET', buckets, 'at_ms', string.format('%d', now_ms))
  end
  holder.at_ms = math.max(now_ms, stored_ms)
  -- A bucket holds at most what its limit allows in a minute, and a new one is full. A bucket without limit holds 0. A
  -- level is negative after requests that took more tokens than they had reserved.
  local function level_of(name)
    local limit, stored = holder.limits[name], redis.call('HGET', buckets, name)
    if limit == 0 or not stored then
      return limit
    end
    local elapsed_ms = holder.at_ms - stored_ms
    return math.min(limit, tonumber(stored) + limit * elapsed_ms / 60000)
  end
  holder.level = {requests = level_of('requests'), tokens = level_of('tokens')}
  return holder
end

-- Store the levels of a holder until both buckets are full again.
local function store(holder)
  if holder.limits.requests + holder.limits.tokens == 0 then
    return
  end
  local full_ms = 0
  for name, limit in pairs(holder.limits) do
    if limit > 0 then
      holder.level[name] = math.min(limit, holder.level[name])
      full_ms = math.max(full_ms, (limit - holder.level[name]) / limit * 60000)
      redis.call('HSET', holder.buckets, name, string.format('%.3f', holder.level[name]))
    end
  end
  redis.call('HSET', holder.buckets, 'at_ms', string.format('%d', holder.at_ms))
  redis.call('PEXPIRE', holder.buckets, string.format('%d', math.ceil(full_ms) + 1000))
end
