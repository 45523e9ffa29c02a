-- Move requests back to their tiers whose leases were not renewed meanwhile.
-- ARGV: id and expires_ms of each lease. Returns the ids of the moved requests.
local ids = {}
for i = 1, #ARGV, 2 do
  if tonumber(redis.call('ZSCORE', LEASES, ARGV[i]) or -1) == tonumber(ARGV[i + 1]) then
    ids[#ids + 1] = ARGV[i]
  end
end
return give_back_all(ids)
