-- Remove a file's record, and remove the file from all lists. A tombstone stores the file's position for a while, so
-- that the file can still be the cursor for the next page of a list.
-- KEYS: record, index of the owner's files, index of the owner's files with this purpose, expiry, tombstone,
--   bytes by owner.
-- ARGV: id, lifetime of the tombstone in seconds, owner.
-- Returns 1 if the file existed, else 0. A repeated call finds the tombstone and returns 1 too.
local record, index, purpose_index, expiry, tombstone, usage = unpack(KEYS)
local id, tombstone_s, owner = unpack(ARGV)

local position = redis.call('ZSCORE', index, id)
if not position then
  return redis.call('EXISTS', tombstone)
end
-- First a removal: a store whose memory is full refuses a script that begins with a write of another kind.
for _, sorted_set in ipairs({index, purpose_index, expiry}) do
  redis.call('ZREM', sorted_set, id)
end
local old = redis.call('GET', record)
redis.call('DEL', record)
if old and redis.call('HINCRBY', usage, owner, -cjson.decode(old).bytes) <= 0 then
  redis.call('HDEL', usage, owner)
end
redis.call('SET', tombstone, position, 'EX', tombstone_s)
return 1
