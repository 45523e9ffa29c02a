-- Remove a response.
-- KEYS: record, expiry, sizes, total.
-- ARGV: id, owner.
-- Returns 1 if the owner had such a response, else 0.
local record, expiry, sizes, total = unpack(KEYS)
local id, owner = unpack(ARGV)

if redis.call('HGET', record, 'owner') ~= owner then
  return 0
end
drop(id, expiry, sizes, total)
return 1
