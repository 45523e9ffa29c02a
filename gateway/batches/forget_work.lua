-- Remove the results of a batch that is over, and remove the batch from the set of unfinished batches.
-- KEYS: results, unfinished, owner lock.
-- ARGV: owner's token, id.
-- Returns 1 if the batch was in the set, 0 if it was not in the set, or -1 if the caller does not own the batch.
local results, unfinished, owner = unpack(KEYS)
local token, id = unpack(ARGV)

if redis.call('GET', owner) ~= token then
  return -1
end
redis.call('DEL', results)
return redis.call('SREM', unfinished, id)
