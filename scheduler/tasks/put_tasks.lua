-- Enqueue tasks of one owner with their inputs, or none of them. `enqueue` is the script `put` of the queue.
-- ARGV: owner, maximum of bytes that the owner's tasks may have, number of tasks, their inputs, the arguments of `put`.
-- Returns what `put` returns, or {'bytes', held} if the owner's waiting and running tasks would have too many.
local owner, max_bytes, count = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local put = {}
for i = 4 + count, #ARGV do
  put[#put + 1] = ARGV[i]
end

local fresh, sum = {}, 0
for n = 1, count do
  local id, payload = put[7 * n + 4], put[7 * n + 8]
  if not fresh[id] and redis.call('EXISTS', REQUEST .. id) == 0 then
    fresh[id] = { ARGV[3 + n], #ARGV[3 + n] + #payload }
    sum = sum + fresh[id][2]
  end
end
local held = tonumber(redis.call('HGET', BYTES, owner) or 0)
if held + sum > max_bytes then
  return { 'bytes', held }
end
local refused = enqueue(put)
if #refused > 0 then
  return refused
end
for id, found in pairs(fresh) do
  redis.call('HSET', REQUEST .. id, 'input', found[1], 'bytes', found[2])
  count_bytes(owner, found[2])
end
return {}
