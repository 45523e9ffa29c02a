-- Forget finished requests.
-- ARGV: id and fence of each lease. Returns 1 for each lease that was held, else 0.
local done = {}
for i = 1, #ARGV, 2 do
  local id = ARGV[i]
  local held = holds(id, ARGV[i + 1])
  if held then
    forget(id)
  end
  done[#done + 1] = held and 1 or 0
end
return done
