-- End an upload that is pending, and free what it has reserved in the quota of its owner.
-- KEYS: record, pending uploads of the owner. ARGV: new status, `<id>:<bytes>`.
-- Returns the status that the upload has now, or 'unknown' if there is no such upload.
local record, pending = unpack(KEYS)
local target, member = unpack(ARGV)

local status = redis.call('HGET', record, 'status')
if status ~= 'pending' then
  return status or 'unknown'
end
redis.call('ZREM', pending, member)
redis.call('HSET', record, 'status', target)
return target
