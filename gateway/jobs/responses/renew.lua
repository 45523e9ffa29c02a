-- Renew the leases of responses that a gateway generates in the background.
-- ARGV: end of the lease in ms, then the ids.
-- Returns the ids of the responses that were cancelled or removed.
local gone = {}
for i = 2, #ARGV do
  local record = RECORD .. ARGV[i]
  local status = redis.call('HGET', record, 'status')
  if not status or status == 'cancelled' then
    gone[#gone + 1] = ARGV[i]
  else
    redis.call('HSET', record, 'lease_ms', ARGV[1])
  end
end
return gone
