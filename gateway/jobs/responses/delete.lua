-- Remove a response.
-- KEYS: record. ARGV: id, owner.
-- Returns 1 if the owner had such a response, else 0.
local id, owner = unpack(ARGV)

if redis.call('HGET', KEYS[1], 'owner') ~= owner then
  return 0
end
drop(id, owner)
return 1
