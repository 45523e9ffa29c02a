-- Add a message to the stream of a gateway, if there is one. KEYS: the stream. ARGV: the most messages, field, message.
-- Returns 1, or 0 without a stream.
-- Ids come from `take_unlost_numbers` and not from the server's clock: after a failover to a server that has lost messages, or
-- whose clock is behind, a new message still comes after all that its gateway has read.
if redis.call('EXISTS', KEYS[1]) == 0 then
  return 0
end
local now = redis.call('TIME')
local number = take_unlost_numbers(1, 1000 * now[1] + math.floor(now[2] / 1000))
redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[1], string.format('%.0f', number) .. '-1', ARGV[2], ARGV[3])
return 1
