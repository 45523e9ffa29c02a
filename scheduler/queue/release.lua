-- Give unfinished requests back to their tiers. The claim does not count as an attempt.
-- ARGV: id and fence of each lease. Returns 1 for each lease that was held, else 0.
local released = {}
for i = 1, #ARGV, 2 do
  local held = holds(ARGV[i], ARGV[i + 1]) and give_back(ARGV[i])
  if held then
    redis.call('HINCRBY', REQUEST .. ARGV[i], 'attempt', -1)
  end
  released[#released + 1] = held and 1 or 0
end
return released
