-- Move the requests that one worker holds back to their tiers. ARGV: worker id. Returns their ids, sorted by expiry.
local ids = {}
for _, id in ipairs(redis.call('ZRANGE', LEASES, 0, -1)) do
  if redis.call('HGET', REQUEST .. id, 'worker') == ARGV[1] then
    ids[#ids + 1] = id
  end
end
local moved = give_back_all(ids)
redis.call('DEL', ALONE .. ARGV[1])
return moved
