-- Add counts to the usage of some days. A repeated call changes nothing, also one that arrives late, on a connection that
-- the gateway has given up: it makes a call only when the one before is known to be done.
-- KEYS: number of the gateway's last call, then one hash per day.
-- ARGV: seconds until this number expires; seconds until a day's hash expires; number of this call; then for each count:
-- index of its day in KEYS, field, number.
-- Returns 1, or 0 if the call is a repeated one.
if tonumber(redis.call('GET', KEYS[1]) or 0) >= tonumber(ARGV[3]) then
  return 0
end
redis.call('SET', KEYS[1], ARGV[3], 'EX', ARGV[1])
for i = 4, #ARGV, 3 do
  redis.call('HINCRBY', KEYS[tonumber(ARGV[i])], ARGV[i + 1], ARGV[i + 2])
end
for i = 2, #KEYS do
  redis.call('EXPIRE', KEYS[i], ARGV[2])
end
return 1
