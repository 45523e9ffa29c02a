-- Store the record of a new batch, and add the batch to the lists. A batch that exists already is not changed.
-- KEYS: record, index of the owner's batches, position counter, unfinished, by_status.
-- ARGV: id, status, then the name and the value of each other field.
-- Returns 1 if the batch is new, else 0.
local record, index, counter, unfinished, by_status = unpack(KEYS)
local id, status = ARGV[1], ARGV[2]

if redis.call('EXISTS', record) == 1 then
  return 0
end
redis.call('HSET', record, 'status', status)
for i = 3, #ARGV, 2 do
  redis.call('HSET', record, ARGV[i], ARGV[i + 1])
end
redis.call('ZADD', index, redis.call('INCR', counter), id)
redis.call('SADD', unfinished, id)
redis.call('HINCRBY', by_status, status, 1)
return 1
