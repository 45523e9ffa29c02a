-- Give claimed tasks back into other lanes.
-- ARGV, of each task: id, fence, lane, task, change of its number of tries (0 or -1).
-- Returns 1 for each task whose lease was held, else 0.
local retried = {}
for i = 1, #ARGV, 5 do
  local id, fence, lane, task, change = unpack(ARGV, i, i + 4)
  local held = holds(id, fence)
  if held then
    redis.call('HSET', REQUEST .. id, 'tier', lane, 'payload', task)
    redis.call('HINCRBY', REQUEST .. id, 'attempt', change)
    give_back(id)
  end
  retried[#retried + 1] = held and 1 or 0
end
return retried
