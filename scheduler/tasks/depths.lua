-- ARGV: lanes. Returns, of each lane, the number of waiting tasks and the score of the first (0 if there is none).
local found = {}
for i, lane in ipairs(ARGV) do
  local first = redis.call('ZRANGE', QUEUE .. lane, 0, 0, 'WITHSCORES')
  found[2 * i - 1] = first[1] and redis.call('ZCARD', QUEUE .. lane) or 0
  found[2 * i] = first[2] or '0'
end
return found
