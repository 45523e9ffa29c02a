-- Store a value of the answer cache, and make room for it: the values that would expire first go first. The index and the
-- sizes expire with the last value.
-- KEYS: index (sorted set of the values' keys, with their expiry in ms), sizes (hash: bytes of each value by its key,
-- and their sum as `total`), key of the value.
-- ARGV: now in ms; milliseconds until the value expires; most bytes of all values; value.
-- Returns the number of bytes of all values now.
local index, sizes, key = unpack(KEYS)
local now_ms, ttl_ms, max_bytes, value = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4]

local function total()
  return tonumber(redis.call('HGET', sizes, 'total') or 0)
end

local function drop(old)
  redis.call('HINCRBY', sizes, 'total', -tonumber(redis.call('HGET', sizes, old) or 0))
  redis.call('HDEL', sizes, old)
  redis.call('ZREM', index, old)
  redis.call('DEL', old)
end

drop(key)
for _, expired in ipairs(redis.call('ZRANGEBYSCORE', index, '-inf', now_ms)) do
  drop(expired)
end
while total() + #value > max_bytes do
  local first = redis.call('ZRANGE', index, 0, 0)[1]
  if not first then
    break
  end
  drop(first)
end
redis.call('SET', key, value, 'PX', ttl_ms)
redis.call('ZADD', index, now_ms + ttl_ms, key)
redis.call('HSET', sizes, key, #value)
local sum = redis.call('HINCRBY', sizes, 'total', #value)
local left_ms = tonumber(redis.call('ZRANGE', index, -1, -1, 'WITHSCORES')[2]) - now_ms
redis.call('PEXPIRE', index, left_ms)
redis.call('PEXPIRE', sizes, left_ms)
return sum
