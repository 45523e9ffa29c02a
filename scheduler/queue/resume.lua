-- Give claimed requests back to their tiers, with the output that their gateways have received: the next claim continues
-- from it, or from what is stored if that begins alike. This claim does not count as an attempt.
-- ARGV: id, fence and received tokens (4 bytes each) of each request. Returns 1 for each lease that was held, else 0.
local given = {}
for i = 1, #ARGV, 3 do
  local id, held = ARGV[i], holds(ARGV[i], ARGV[i + 1])
  if held then
    local key, number = output_of(id)
    local tokens = ARGV[i + 2]
    local received = #tokens / 4
    if writer_of(key) > number then -- a later request for the same part of a job has an output of its own
      received = 0
    elseif redis.call('GETRANGE', key, #number, #number + #tokens - 1) ~= tokens then
      redis.call('SET', key, number .. tokens, 'PX', OUTPUT_TTL_MS)
    end
    held = give_back(id)
    redis.call('HINCRBY', REQUEST .. id, 'attempt', -1)
    redis.call('HSET', REQUEST .. id, 'received', received)
  end
  given[#given + 1] = held and 1 or 0
end
return given
