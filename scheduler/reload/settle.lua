-- End the proposal ARGV[1] if it is still the current one; if ARGV[2] is 1, put it in force.
-- KEYS: the tiers' hash, the current proposal. ARGV[3]: the channel that tells the followers.
-- Return 1 if the proposal is in force.
if redis.call('GET', KEYS[2]) == ARGV[1] then
  if ARGV[2] == '1' then redis.call('HSET', KEYS[1], 'in_force', ARGV[1]) end
  redis.call('DEL', KEYS[2])
  redis.call('PUBLISH', ARGV[3], '')
end
return redis.call('HGET', KEYS[1], 'in_force') == ARGV[1] and 1 or 0
