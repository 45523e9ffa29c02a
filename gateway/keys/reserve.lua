-- Take one request and some tokens from the buckets, and places for the request's choices: all of them or nothing.
-- ARGV, after those of buckets.lua: tokens; milliseconds until the places expire; the ids of the choices, if any.
-- Returns 'ok', 'open', 'requests' or 'tokens' (what is lacking), and the levels of requests and tokens as texts.
-- A repeated call with the ids of an open request takes nothing.
local tokens, lease_ms, first, num_choices = tonumber(ARGV[5]), tonumber(ARGV[6]), ARGV[7], #ARGV - 6

local function answer(lacking)
  return {lacking, string.format('%.3f', level.requests), string.format('%.3f', level.tokens)}
end

if first then
  redis.call('ZREMRANGEBYSCORE', open, '-inf', now_ms)
  redis.call('ZREMRANGEBYSCORE', open, now_ms + 2 * lease_ms, '+inf')  -- left from before a clock was set back
  if redis.call('ZSCORE', open, first) then
    return answer('ok')
  end
  if max_open > 0 and redis.call('ZCARD', open) + num_choices > max_open then
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
if first then
  for place = 7, #ARGV do
    redis.call('ZADD', open, now_ms + lease_ms, ARGV[place])
  end
  redis.call('PEXPIRE', open, lease_ms)
end
return answer('ok')
