-- Record which requests a worker's next step can be blamed for, if the worker dies in it.
-- ARGV: worker id, lifetime in ms of the record of a request that runs alone, id of that request (empty: none runs
-- alone); then id, fence and 1 (the request waits) or 0 (it may be in the step) of each request with a changed mark.
local alone = ALONE .. ARGV[1]
if ARGV[3] == '' then
  redis.call('DEL', alone)
else
  redis.call('SET', alone, ARGV[3], 'PX', ARGV[2])
end
for i = 4, #ARGV, 3 do
  local id, fence, waits = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  if holds(id, fence) then
    redis.call('HSET', REQUEST .. id, 'waits', waits)
  end
end
