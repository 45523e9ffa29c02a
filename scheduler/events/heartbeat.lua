-- Let a gateway's number grow, and its stream live on without the entries that were read.
-- KEYS: stream, number. ARGV: lifetime in ms, replication id of the server at the last heartbeat, last entry that was
-- read, 1 if the stream is opened: then it gets an entry that is no message.
-- On another server, entries before the last one may be unread: it may have lost some, and its clock may be behind.
-- Returns 1, or 0 without a stream; and the replication id of this server.
local stream, number = unpack(KEYS)
local ttl_ms, known, last_read, opens = unpack(ARGV)

local replication = string.match(redis.call('INFO', 'replication'), 'master_replid:(%x+)') or ''
if replication == known then
  redis.call('XTRIM', stream, 'MINID', last_read)
end
if opens == '1' then
  redis.call('XADD', stream, '*', 'opened', '')
end
redis.call('INCR', number)
redis.call('PEXPIRE', number, ttl_ms)
return { redis.call('PEXPIRE', stream, ttl_ms), replication }
