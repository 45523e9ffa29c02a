-- Read a conversation: the input and the output of a response and of all responses before it. Each of them is kept for
-- its full lifetime again, so that a conversation that goes on does not lose its beginning.
-- ARGV: id of the last response, owner, new expiry in ms, limit in bytes.
-- Returns 'ok', then input and output of each response, the last response first; or 'missing' or 'running' and the id
-- of the response; or 'too_long'.
local id, owner, expires_ms, max_bytes = unpack(ARGV)

local found, bytes, known = {'ok'}, 0, {}
while id ~= '' and not known[id] do
  known[id] = true
  local record = RECORD .. id
  local own, previous, input, output = unpack(redis.call('HMGET', record, 'owner', 'previous', 'input', 'output'))
  if own ~= owner then
    return {'missing', id}
  end
  if is_running(record) then
    return {'running', id}
  end
  bytes = bytes + #input + #output
  if bytes > tonumber(max_bytes) then
    return {'too_long'}
  end
  redis.call('PEXPIREAT', record, expires_ms)
  redis.call('ZADD', OF .. owner, 'XX', expires_ms, id)
  found[#found + 1] = input
  found[#found + 1] = output
  id = previous
end
return found
