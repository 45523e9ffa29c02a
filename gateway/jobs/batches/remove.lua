-- Remove a batch and all that is known of it. If it was over, a tombstone stores its position for a while, so that it
-- can still be the cursor for the next page of a list.
-- KEYS: record, index of the owner's batches, unfinished, by_status, done, results, ended, tombstone.
-- ARGV: id, lifetime of the tombstone in seconds, 1 if the batch is removed only if it is over and cleared up.
-- Returns 1, or 0 if the batch is not over.
local record, index, unfinished, by_status, done, results, ended, tombstone = unpack(KEYS)
local id, tombstone_s, must_be_over = unpack(ARGV)

if must_be_over == '1' and redis.call('SISMEMBER', unfinished, id) == 1 then
  return 0
end
local status, position = redis.call('HGET', record, 'status'), redis.call('ZSCORE', index, id)
redis.call('ZREM', ended, id)
if status then
  redis.call('DEL', record, done, results)
  redis.call('ZREM', index, id)
  redis.call('SREM', unfinished, id)
  redis.call('HINCRBY', by_status, status, -1)
end
if position and must_be_over == '1' then
  redis.call('SET', tombstone, position, 'EX', tombstone_s)
end
return 1
