-- Set a new expiry for leases.
-- ARGV: expires_ms, then id and fence of each lease. Returns 1 for each lease that was held, else 0.
local renewed, scores = {}, {}
for i = 2, #ARGV, 2 do
  local held = holds(ARGV[i], ARGV[i + 1])
  if held then
    scores[#scores + 1], scores[#scores + 2] = ARGV[1], ARGV[i]
  end
  renewed[#renewed + 1] = held and 1 or 0
end
for_members('ZADD', LEASES, scores)
return renewed
