-- Add a part to an upload that is pending. A part that is there already is not counted twice.
-- KEYS: record. ARGV: id of the part, its bytes, the most bytes of all parts, the most parts.
-- Returns 'pending' if the part is there now, 'full' if the upload takes no more, else the status of the upload, or
-- 'unknown' if there is no such upload.
local record = KEYS[1]
local id, bytes, max_bytes, max_parts = unpack(ARGV)

local status = redis.call('HGET', record, 'status')
if status ~= 'pending' then
  return status or 'unknown'
end
if redis.call('HEXISTS', record, id) == 1 then
  return 'pending'
end
local received = tonumber(redis.call('HGET', record, 'received')) + tonumber(bytes)
local num_parts = redis.call('HLEN', record) - 3
if received > tonumber(max_bytes) or num_parts >= tonumber(max_parts) then
  return 'full'
end
redis.call('HSET', record, id, bytes, 'received', string.format('%d', received))
return 'pending'
