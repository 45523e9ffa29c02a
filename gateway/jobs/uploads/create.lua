-- Store the record of a new upload, and reserve its bytes in the quota of its owner. An upload that exists already is
-- not changed.
-- KEYS: record, pending uploads of the owner (sorted set of `<id>:<bytes>` by expires_at).
-- ARGV: id, record, bytes, expires_at, now, seconds for which the record is kept after its expiry, bytes that pending
--       uploads of the owner may have together, or '' for no limit, number of pending uploads that the owner may have.
-- Returns -1 if the upload exists now, and -2 if too many are pending. If it would exceed the limit of bytes, returns
-- those of the owner's pending uploads.
local record, pending = unpack(KEYS)
local id, content, bytes, expires_at, now, kept_s, limit, most = unpack(ARGV)

if redis.call('EXISTS', record) == 1 then
  return -1
end
redis.call('ZREMRANGEBYSCORE', pending, '-inf', now)
if redis.call('ZCARD', pending) >= tonumber(most) then
  return -2
end
local reserved = 0
for _, member in ipairs(redis.call('ZRANGE', pending, 0, -1)) do
  reserved = reserved + tonumber(string.match(member, ':(%d+)$'))
end
if limit ~= '' and reserved + tonumber(bytes) > tonumber(limit) then
  return reserved
end
redis.call('HSET', record, 'upload', content, 'status', 'pending', 'received', 0)
redis.call('EXPIREAT', record, expires_at + kept_s)
redis.call('ZADD', pending, expires_at, id .. ':' .. bytes)
redis.call('EXPIREAT', pending, expires_at + kept_s)
return -1
