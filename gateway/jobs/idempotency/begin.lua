-- Begin an attempt at a request with an idempotency key, unless another attempt runs or has ended well.
-- KEYS: record. ARGV: fingerprint of the request, token of the attempt, id for what the request creates, now in ms,
--   end of the attempt's lease in ms, lifetime of the record in ms.
-- Returns {'new', id}, with the id of the first attempt; {'done', answer}; {'running'}; or {'other'} if the record is of
-- another request. A repeated call returns the same.
local record = KEYS[1]
local fingerprint, token, id, now_ms, lease_ms, lifetime_ms = unpack(ARGV)

local found = redis.call('HMGET', record, 'fingerprint', 'token', 'id', 'lease_ms', 'answer')
if found[1] and found[1] ~= fingerprint then
  return { 'other' }
end
if found[5] then
  return { 'done', found[5] }
end
if found[1] and found[2] ~= token and tonumber(found[4]) > tonumber(now_ms) then
  return { 'running' }
end
id = found[3] or id
redis.call('HSET', record, 'fingerprint', fingerprint, 'token', token, 'id', id, 'lease_ms', lease_ms)
if not found[1] then
  redis.call('PEXPIRE', record, lifetime_ms)
end
return { 'new', id }
