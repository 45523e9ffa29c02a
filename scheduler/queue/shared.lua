-- Put in front of every script of this folder, after the key names of keys.py (QUEUE, REQUEST, LEASES,
-- SEQUENCE, WAKE). Scripts move requests atomically; they decide nothing.
--
-- Redis undoes nothing when a script fails half-way, so scripts check before they write and step over a
-- request whose hash somebody else has removed (an eviction policy, a careless hand).

-- The first of `count` consecutive numbers, each greater than all that were given out before. They start from
-- the clock, so that this stays true when the server lost its last writes, or everything.
local function take_numbers(count, now_ms)
  local last = tonumber(redis.call('GET', SEQUENCE) or '0')
  local first = math.max(last + 1, tonumber(now_ms))
  redis.call('SET', SEQUENCE, string.format('%.0f', first + count - 1))
  return first
end

local function holds(id, fence)
  return redis.call('HGET', REQUEST .. id, 'fence') == fence
end

-- From the lease set back into the tier's set, to the old place.
local function give_back(id)
  local key = REQUEST .. id
  local fields = redis.call('HMGET', key, 'tier', 'deadline_ms', 'member')
  redis.call('ZREM', LEASES, id)
  if not fields[1] then
    return false
  end
  redis.call('HDEL', key, 'fence', 'worker')
  redis.call('ZADD', QUEUE .. fields[1], fields[2], fields[3])
  return true
end

local function give_back_all(ids)
  local moved = {}
  for _, id in ipairs(ids) do
    if give_back(id) then
      moved[#moved + 1] = id
    end
  end
  if #moved > 0 then
    redis.call('PUBLISH', WAKE, 'wake')
  end
  return moved
end
