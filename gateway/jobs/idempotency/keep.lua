-- Keep the answer of an attempt. While the answers of its owner have too many bytes, the oldest records go.
-- KEYS: record, the owner's answers (sorted set of `<record>:<bytes>` by their time in ms), sum of their bytes.
-- ARGV: token of the attempt, answer, now in ms, lifetime in ms, most bytes.
-- Returns 1, or 0 if the record is of another attempt or gone.
local record, answers, sum = unpack(KEYS)
local token, answer, now_ms, lifetime_ms, most = unpack(ARGV)

local function forget(member)
  redis.call('ZREM', answers, member)
  return redis.call('DECRBY', sum, string.match(member, ':(%d+)$'))
end

if redis.call('HGET', record, 'token') ~= token then
  return 0
end
redis.call('HSET', record, 'answer', answer)
for _, expired in ipairs(redis.call('ZRANGE', answers, '-inf', now_ms - lifetime_ms, 'BYSCORE')) do
  forget(expired)
end
redis.call('ZADD', answers, now_ms, record .. ':' .. #answer)
local bytes = redis.call('INCRBY', sum, #answer)
while bytes > tonumber(most) and redis.call('ZCARD', answers) > 1 do
  local oldest = redis.call('ZRANGE', answers, 0, 0)[1]
  bytes = forget(oldest)
  redis.call('DEL', (string.match(oldest, '^(.*):')))
end
redis.call('PEXPIRE', answers, lifetime_ms)
redis.call('PEXPIRE', sum, lifetime_ms)
return 1
