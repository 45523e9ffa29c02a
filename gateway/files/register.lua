-- Store a file's record, and give a new file the next position in the lists of its owner. Count its bytes.
-- If the file exists already, its record is replaced and its position stays the same.
-- KEYS: record, index of the owner's files, index of the owner's files with this purpose, expiry, position counter,
--   bytes by owner.
-- ARGV: record, id, expires_at in Unix seconds or '' for never, owner, bytes of the file,
--   largest number of bytes of the owner's files or '' for no limit.
-- Returns -1 if the file is stored. If it would exceed the limit, returns the bytes of the owner's other files.
local record, index, purpose_index, expiry, counter, usage = unpack(KEYS)
local content, id, expires_at, owner, size, quota = unpack(ARGV)

local old = redis.call('GET', record)
local old_size = old and cjson.decode(old).bytes or 0
local used = tonumber(redis.call('HGET', usage, owner) or '0') - old_size
if quota ~= '' and used + tonumber(size) > tonumber(quota) then
  return used
end
if not old then
  local position = redis.call('INCR', counter)
  redis.call('ZADD', index, position, id)
  redis.call('ZADD', purpose_index, position, id)
end
redis.call('SET', record, content)
redis.call('HINCRBY', usage, owner, tonumber(size) - old_size)
if expires_at ~= '' then
  redis.call('ZADD', expiry, expires_at, id)
end
return -1
