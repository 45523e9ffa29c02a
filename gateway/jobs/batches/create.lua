-- Store the record of a new batch, and add the batch to the lists. A batch that exists already is not changed.
-- KEYS: record, index of the owner's batches, position counter, unfinished, by_status, unfinished batches of the owner.
-- ARGV: maximum of unfinished batches of the owner, or -1; id; status; then the name and the value of each other field.
-- Returns 1 if the batch is new, 0 if it exists, or -1 if the owner has the maximum.
local record, index, counter, unfinished, by_status, of_owner = unpack(KEYS)
local limit, id, status = tonumber(ARGV[1]), ARGV[2], ARGV[3]

if redis.call('EXISTS', record) == 1 then
  return 0
end
redis.call('SINTERSTORE', of_owner, of_owner, unfinished)  -- without those that are over
if limit >= 0 and redis.call('SCARD', of_owner) >= limit then
  return -1
end
redis.call('HSET', record, 'status', status)
for i = 4, #ARGV, 2 do
  redis.call('HSET', record, ARGV[i], ARGV[i + 1])
end
redis.call('ZADD', index, redis.call('INCR', counter), id)
redis.call('SADD', unfinished, id)
redis.call('SADD', of_owner, id)
redis.call('HINCRBY', by_status, status, 1)
return 1
