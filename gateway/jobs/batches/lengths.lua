-- Add what finished lines show to the sums of one model and endpoint. Older lines lose weight with each newer one.
-- KEYS: sums. ARGV: factor of the older sums, lifetime in seconds, then the name and the value of each sum.
-- Returns the new sums in the order of their names, as texts.
local sums = KEYS[1]
local kept, lifetime_s = tonumber(ARGV[1]), ARGV[2]

local new = {}
for i = 3, #ARGV, 2 do
  local before = tonumber(redis.call('HGET', sums, ARGV[i]) or 0)
  local value = string.format('%.6g', before * kept + ARGV[i + 1])
  redis.call('HSET', sums, ARGV[i], value)
  new[#new + 1] = value
end
redis.call('EXPIRE', sums, lifetime_s)
return new
