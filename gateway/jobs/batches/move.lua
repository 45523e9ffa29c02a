-- Move a batch to another status, set the time of the move, and change other fields.
-- KEYS: record, owner lock, by_status.
-- ARGV: owner's token, or '' if every caller may move the batch; allowed source statuses, joined by ','; target status;
--       now in Unix seconds; then the name and the value of each field to change.
-- Returns 'moved' (also if the batch already has the target status), 'not_owner' or 'illegal'.
local record, owner, by_status = unpack(KEYS)
local token, sources, target, now_s = ARGV[1], ARGV[2], ARGV[3], ARGV[4]

if token ~= '' and redis.call('GET', owner) ~= token then
  return 'not_owner'
end
local status = redis.call('HGET', record, 'status')
if status == target then
  return 'moved'
end
local is_legal = status and string.find(',' .. sources .. ',', ',' .. status .. ',', 1, true)
if not is_legal then
  return 'illegal'
end
redis.call('HSET', record, 'status', target)
redis.call('HSETNX', record, target .. '_at', now_s)
for i = 5, #ARGV, 2 do
  redis.call('HSET', record, ARGV[i], ARGV[i + 1])
end
redis.call('HINCRBY', by_status, status, -1)
redis.call('HINCRBY', by_status, target, 1)
return 'moved'
