-- Add counts to the usage of some days. A repeated call with the same id changes nothing.
-- KEYS: marker of this call, then one hash per day.
-- ARGV: seconds until the marker expires; seconds until a day's hash expires; then for each count: index of its day in
-- KEYS, field, number.
-- Returns 1, or 0 if the call is a repeated one.
if not redis.call('SET', KEYS[1], '', 'NX', 'EX', ARGV[1]) then
  return 0
end
for i = 3, #ARGV, 3 do
  redis.call('HINCRBY', KEYS[tonumber(ARGV[i])], ARGV[i + 1], ARGV[i + 2])
end
for i = 2, #KEYS do
  redis.call('EXPIRE', KEYS[i], ARGV[2])
end
return 1
