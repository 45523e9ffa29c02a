-- End an open request: free the places of its choices, and return the tokens that it had reserved and did not use.
-- ARGV, after those of buckets.lua: tokens to return (negative: it used more); ids of the choices.
-- Returns 1, or 0 if the request is not open any more. A repeated call changes nothing.
local tokens, num_removed = tonumber(ARGV[5]), 0

for place = 6, #ARGV do
  num_removed = num_removed + redis.call('ZREM', open, ARGV[place])
end
if num_removed == 0 then
  return 0
end
if limits.tokens > 0 then
  level.tokens = level.tokens + tokens
  store()
end
return 1
