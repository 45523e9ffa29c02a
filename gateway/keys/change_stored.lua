-- Add or remove one API key that the store keeps, unless another change came first.
-- KEYS: hash of the keys by id; the number of changes so far.
-- ARGV: the number of changes that the caller knows; the key's id; its record (empty: it is removed).
-- Returns 1, or 0 if the caller knows an older state.
if (redis.call('GET', KEYS[2]) or '0') ~= ARGV[1] then
  return 0
end
if ARGV[3] == '' then
  redis.call('HDEL', KEYS[1], ARGV[2])
else
  redis.call('HSET', KEYS[1], ARGV[2], ARGV[3])
end
redis.call('INCR', KEYS[2])
return 1
