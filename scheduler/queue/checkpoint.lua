-- Store output tokens of leased requests, so that the next claim continues from them.
-- ARGV: id, fence, index and tokens (4 bytes each) of each request. `index` is the position of the first token in the
-- whole output. Tokens at index 0 replace what is stored, all others must follow what this request has stored.
-- Returns the number of tokens stored for each request, or -1 if its lease was not held, or if a request that was put
-- later works on the same part of a job.
local stored = {}
for i = 1, #ARGV, 4 do
  local id, fence, index, tokens = ARGV[i], ARGV[i + 1], tonumber(ARGV[i + 2]), ARGV[i + 3]
  local count = -1
  if holds(id, fence) then
    local key, number = output_of(id)
    local writer = writer_of(key)
    if writer <= number then
      if index == 0 then
        redis.call('SET', key, number .. tokens, 'PX', OUTPUT_TTL_MS)
      elseif writer == number and redis.call('STRLEN', key) == #number + 4 * index then
        redis.call('APPEND', key, tokens)
        redis.call('PEXPIRE', key, OUTPUT_TTL_MS)
      end
      count = math.max(0, redis.call('STRLEN', key) - #number) / 4
    end
  end
  stored[#stored + 1] = count
end
return stored
