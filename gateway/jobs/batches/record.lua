-- Record a group of results that was written to the storage: count its lines as done, and add it to the counts in the
-- batch's record. A group is recorded as a whole or not at all.
-- KEYS: record, done (bitmap, a bit for each line), results (hash: recorded bytes of each content), owner lock.
-- ARGV: owner's token; name of the content; positions of the group's first byte and behind its last byte; number of
--       the counts, then the name and the increment of each; then the numbers of the group's lines.
-- Returns the number of lines; 0 if the group was recorded before; -1 if the caller does not own the batch; -2 if the
-- store does not know what the caller relies on, because it has lost its latest writes or the batch was withdrawn.
local record, done, results, owner = unpack(KEYS)
local token, name, first, last, counts = unpack(ARGV, 1, 5)

if redis.call('GET', owner) ~= token then
  return -1
end
local recorded = redis.call('HGET', results, name) or '0'
if recorded == last then
  return 0
end
local lines = 6 + 2 * counts
if recorded ~= first or redis.call('EXISTS', record) == 0 then
  return -2
end
for i = lines, #ARGV do
  if redis.call('GETBIT', done, ARGV[i]) == 1 then
    return -2
  end
end
redis.call('HSET', results, name, last)
for i = lines, #ARGV do
  redis.call('SETBIT', done, ARGV[i], 1)
end
for i = 6, lines - 1, 2 do
  redis.call('HINCRBY', record, ARGV[i], ARGV[i + 1])
end
return #ARGV - lines + 1
