-- Take one request and some tokens from the buckets, and a place among the open requests: all of them or nothing.
-- ARGV, after those of buckets.lua: tokens; id of the request ('': it takes no place); milliseconds until its place expires.
-- Returns 'ok', 'open', 'requests' or 'tokens' (what is lacking), and the levels of requests and tokens as texts.
-- A repeated call with the id of an open request takes nothing.
local tokens, id, lease_ms = tonumber(ARGV[5]), ARGV[6], tonumber(ARGV[7])

local function answer(lacking)
  return {lacking, string.format('%.3f', level.requests), string.format('%.3f', level.tokens)}
end

if id ~= '' then
  redis.call('ZREMRANGEBYSCORE', open, '-inf', now_ms)
  redis.call('ZREMRANGEBYSCORE', open, now_ms + 2 * lease_ms, '+inf')  -- left from before a clock was set back
  if redis.call('ZSCORE', open, id) then
    return answer('ok')
  end
  if max_open > 0 and redis.call('ZCARD', open) >= max_open then
    return answer('open')
  end
end
if limits.requests > 0 and level.requests < 1 then
  return answer('requests')
end
if limits.tokens > 0 and tokens > 0 and level.tokens < tokens then
  return answer('tokens')
end

level.requests = level.requests - 1
level.tokens = level.tokens - tokens
store()
if id ~= '' then
  redis.call('ZADD', open, now_ms + lease_ms, id)
  redis.call('PEXPIRE', open, lease_ms)
end
return answer('ok')
