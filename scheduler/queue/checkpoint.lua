-- Store output tokens of leased requests, so that the next claim continues from them.
-- ARGV: lifetime in ms, then id, fence, index and tokens (4 bytes each) of each request. `index` is the position of the
-- first token in the whole output. Tokens at index 0 replace what is stored, all others must follow it.
-- Returns the number of tokens stored for each request, or -1 if its lease was not held.
local stored = {}
for i = 2, #ARGV, 4 do
  local id, fence, index, tokens = ARGV[i], ARGV[i + 1], tonumber(ARGV[i + 2]), ARGV[i + 3]
  local count = -1
  if holds(id, fence) then
    local key = OUTPUT .. id
    if index == 0 then
      redis.call('SET', key, tokens, 'PX', ARGV[1])
    elseif redis.call('STRLEN', key) == 4 * index then
      redis.call('APPEND', key, tokens)
      redis.call('PEXPIRE', key, ARGV[1])
    end
    count = redis.call('STRLEN', key) / 4
  end
  stored[#stored + 1] = count
end
return stored
