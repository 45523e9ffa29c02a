-- Remove a file's record and its places in the lists. A tombstone keeps its position for clients that are paging.
-- KEYS: record, index of the owner, index of the owner and purpose, expiry, tombstone.
-- ARGV: id, lifetime of the tombstone in seconds.
-- Returns 1 if the file was there. A repeated call finds the tombstone and returns 1 too.
local record, index, purpose_index, expiry, tombstone = unpack(KEYS)
local id, tombstone_s = unpack(ARGV)

local position = redis.call('ZSCORE', index, id)
if not position then
  return redis.call('EXISTS', tombstone)
end
redis.call('SET', tombstone, position, 'EX', tombstone_s)
redis.call('DEL', record)
for _, sorted_set in ipairs({index, purpose_index, expiry}) do
  redis.call('ZREM', sorted_set, id)
end
return 1
