-- Drop the results of a batch that is over, and take the batch off the set of unfinished ones.
-- KEYS: results, unfinished, owner lock. ARGV: owner's token, id.
-- Returns 1, 0 if the batch was not in the set any more, or -1 if the caller does not own the batch.
local results, unfinished, owner = unpack(KEYS)
local token, id = unpack(ARGV)

if redis.call('GET', owner) ~= token then
  return -1
end
redis.call('DEL', results)
return redis.call('SREM', unfinished, id)
