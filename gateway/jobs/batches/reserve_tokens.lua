-- Count the prompt tokens of a batch for its key, if they fit under the key's limit beside those of its other
-- unfinished batches. Tokens of batches that are over are forgotten.
-- KEYS: tokens of the key's batches (hash by id), unfinished. ARGV: id, tokens, limit.
-- Returns the tokens of the key's other unfinished batches. A repeated call changes nothing.
local enqueued, unfinished = unpack(KEYS)
local id, tokens, limit = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])

local others = 0
local fields = redis.call('HGETALL', enqueued)
for i = 1, #fields, 2 do
  if redis.call('SISMEMBER', unfinished, fields[i]) == 0 then
    redis.call('HDEL', enqueued, fields[i])
  elseif fields[i] ~= id then
    others = others + tonumber(fields[i + 1])
  end
end
if others + tokens <= limit then
  redis.call('HSET', enqueued, id, ARGV[2])
end
return others
