-- Remove a batch that was not accepted after all, as if it had never been created.
-- KEYS: record, index of the owner's batches, unfinished, by_status, done, results. ARGV: id.
local record, index, unfinished, by_status, done, results = unpack(KEYS)
local id = ARGV[1]

local status = redis.call('HGET', record, 'status')
if status then
  redis.call('DEL', record, done, results)
  redis.call('ZREM', index, id)
  redis.call('SREM', unfinished, id)
  redis.call('HINCRBY', by_status, status, -1)
end
return 1
