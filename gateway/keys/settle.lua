-- End an open request: free its place, and return the tokens that it had reserved and did not use.
-- ARGV, after those of buckets.lua: tokens to return (negative: it used more); id of the request.
-- Returns 1, or 0 if the request is not open any more. A repeated call changes nothing.
local tokens, id = tonumber(ARGV[5]), ARGV[6]

if redis.call('ZREM', open, id) == 0 then
  return 0
end
if limits.tokens > 0 then
  level.tokens = level.tokens + tokens
  store()
end
return 1
