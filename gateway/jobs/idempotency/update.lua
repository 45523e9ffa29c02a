-- Set a field of a record on behalf of its attempt, or remove the record.
-- KEYS: record. ARGV: token of the attempt, then the field and its value, or no field to remove the record.
-- Returns 1, or 0 if the record is of another attempt or gone.
local record = KEYS[1]
local token, field, value = unpack(ARGV)

if redis.call('HGET', record, 'token') ~= token then
  return 0
end
if field then
  redis.call('HSET', record, field, value)
else
  redis.call('DEL', record)
end
return 1
