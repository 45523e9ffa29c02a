-- Write fields of a response. Then remove responses that have expired, and the next ones to expire while the sum of all
-- sizes is larger than the limit. Redis itself removes expired records; their sizes are subtracted here.
-- KEYS: record, expiry (sorted set of ids), sizes (hash), total of the sizes.
-- ARGV: id; 'new', or 'running' to write only if the response is queued or in progress; now and expiry in ms;
--       limit in bytes; then the name and the value of each field.
-- Returns 1 if the fields were written, else 0.
local record, expiry, sizes, total = unpack(KEYS)
local id, guard, now_ms, expires_ms, max_bytes = unpack(ARGV)

if guard == 'running' and not is_running(record) then
  return 0
end
for i = 6, #ARGV, 2 do
  redis.call('HSET', record, ARGV[i], ARGV[i + 1])
end
redis.call('PEXPIREAT', record, expires_ms)
redis.call('ZADD', expiry, expires_ms, id)

local size = 0
for _, field in ipairs({'input', 'output', 'head'}) do
  size = size + redis.call('HSTRLEN', record, field)
end
local old = redis.call('HGET', sizes, id) or 0
redis.call('HSET', sizes, id, size)
redis.call('INCRBY', total, size - old)

for _, expired in ipairs(redis.call('ZRANGE', expiry, '-inf', now_ms, 'BYSCORE', 'LIMIT', 0, 100)) do
  drop(expired, expiry, sizes, total)
end
local sum = tonumber(redis.call('GET', total))
while sum > tonumber(max_bytes) do
  local first = redis.call('ZRANGE', expiry, 0, 0)[1]
  if not first then
    break
  end
  drop(first, expiry, sizes, total)
  sum = tonumber(redis.call('GET', total))
end
return 1
