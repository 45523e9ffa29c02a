-- Numbers that only grow, for claims, puts and messages of events. Put in front of scripts, after SEQUENCE and EPOCH.

-- More numbers than a server can have given out and lost: those of the longest lag of a replica, and of clocks that
-- differ. They are 60 s of the clock.
local MAX_LOST = 60 * 1000 * 1000

local function replication_id()
  return string.match(redis.call('INFO', 'replication'), 'master_replid:(%x+)') or ''
end

-- Return the first of `count` consecutive numbers, which are all greater than all numbers of which this server knows.
-- `passed_over` numbers before them are given to nobody.
local function take_numbers(count, now_ms, passed_over)
  local last = redis.call('GET', SEQUENCE)
  if not last then
    redis.call('SET', EPOCH, replication_id())
  end
  local first = math.max((last or 0) + 1, 1000 * tonumber(now_ms)) + (passed_over or 0)
  redis.call('SET', SEQUENCE, string.format('%.0f', first + count - 1))
  return first
end

-- Return the first of `count` consecutive numbers, which are all greater than all numbers given out before. Numbers
-- start from the clock in microseconds, so that this also holds when the server has lost all its data. A server that has
-- become the primary, or has started again, may have lost its last writes. Its replication id is a new one then, and the
-- numbers that may be lost are passed over. To ask for the id costs more than the rest.
local function take_unlost_numbers(count, now_ms)
  local epoch, known = replication_id(), redis.call('GET', EPOCH)
  if epoch ~= known then
    redis.call('SET', EPOCH, epoch)
  end
  return take_numbers(count, now_ms, known and epoch ~= known and MAX_LOST)
end
