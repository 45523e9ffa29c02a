-- Move the requests that one worker holds back to their tiers. Returns their ids.
-- ARGV: the holder of the leases, or the worker id of all its incarnations (`<worker id>#<incarnation>`).
local ids, holders = {}, {}
local held = HELD .. id_of(ARGV[1])
for _, id in ipairs(redis.call('SMEMBERS', held)) do
  local holder = redis.call('HGET', REQUEST .. id, 'worker')
  if not holder then -- an older version has ended the lease, or somebody has removed the hash
    redis.call('SREM', held, id)
  elseif holder == ARGV[1] or string.sub(holder, 1, #ARGV[1] + 1) == ARGV[1] .. '#' then
    ids[#ids + 1], holders[holder] = id, true
  end
end
local moved = give_back_all(ids)
redis.call('DEL', ALONE .. ARGV[1])
for holder in pairs(holders) do
  redis.call('DEL', ALONE .. holder)
end
return moved
