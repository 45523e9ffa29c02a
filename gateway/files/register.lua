-- Store a file's record, and give a new file the next position in the lists of its owner.
-- If the file exists already, its record is replaced and its position stays the same.
-- KEYS: record, index of the owner's files, index of the owner's files with this purpose, expiry, position counter.
-- ARGV: record, id, expires_at in Unix seconds or '' for never.
local record, index, purpose_index, expiry, counter = unpack(KEYS)
local content, id, expires_at = unpack(ARGV)

if redis.call('EXISTS', record) == 0 then
  local position = redis.call('INCR', counter)
  redis.call('ZADD', index, position, id)
  redis.call('ZADD', purpose_index, position, id)
end
redis.call('SET', record, content)
if expires_at ~= '' then
  redis.call('ZADD', expiry, expires_at, id)
end
return 1
