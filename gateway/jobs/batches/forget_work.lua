-- Remove what is known of the results of a batch that is over, and remove the batch from the set of unfinished batches.
-- KEYS: done, results, unfinished, owner lock, record, ended.
-- ARGV: owner's token, id, statuses of batches that are over, joined by ','; now in Unix seconds.
-- Returns 1 if the batch was in the set, 0 if it was not in the set, -1 if the caller does not own the batch, or -2 if
-- the batch is not over.
local done, results, unfinished, owner, record, ended = unpack(KEYS)
local token, id, ends, now_s = unpack(ARGV)

if redis.call('GET', owner) ~= token then
  return -1
end
local status = redis.call('HGET', record, 'status')
if status and not string.find(',' .. ends .. ',', ',' .. status .. ',', 1, true) then
  return -2
end
redis.call('DEL', done, results)
if status then
  redis.call('ZADD', ended, 'NX', now_s, id)
end
return redis.call('SREM', unfinished, id)
