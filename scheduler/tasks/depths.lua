-- ARGV: worker id (empty: a gateway asks), lanes. From now on, the worker waits for tasks of these lanes, unless the store
-- takes no writes.
-- Returns, of each lane, the number of waiting tasks and the score of the first (0 if there is none).
local found = {}
for i = 2, #ARGV do
  local queue = QUEUE .. ARGV[i]
  local first = redis.call('ZRANGE', queue, 0, 0, 'WITHSCORES')
  found[#found + 1] = first[1] and redis.call('ZCARD', queue) or 0
  found[#found + 1] = first[2] or '0'
  if ARGV[1] ~= '' then
    redis.pcall('ZADD', WAITERS .. ARGV[i], 0, id_of(ARGV[1]))
  end
end
return found
