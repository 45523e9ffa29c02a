-- Write fields of a response. Redis itself removes expired records; here they are also removed from the sums.
-- While all responses together have more than the limit, those go that expire next, of the owner that has the most. What
-- is being generated stays. It has as much room again, because nothing goes for a response that may yet be refused.
-- KEYS: record. ARGV: id, owner; 'new', or 'running' to write only if the response is queued or in progress, or a number
--   to write only if the record still has this version; now and expiry in ms; limit in bytes; then the name and the value
--   of each field. The owner is '' for 'running'.
-- Returns 1 if the fields were written, 0 if they were not because of that, and -1 if there is no room.
local record = KEYS[1]
local id, owner, guard, now_ms, expires_ms = unpack(ARGV)
local limit = tonumber(ARGV[6])

if guard == 'running' then
  if not is_running(record) then
    return 0
  end
  owner = redis.call('HGET', record, 'owner')
elseif guard ~= 'new' then
  local own, version = unpack(redis.call('HMGET', record, 'owner', 'version'))
  if own ~= owner or (version or '0') ~= guard then
    return 0
  end
end
local fields = {}
for i = 7, #ARGV, 2 do
  fields[ARGV[i]] = ARGV[i + 1]
end
local size = 0
for _, name in ipairs({ 'input', 'output', 'head' }) do
  size = size + (fields[name] and #fields[name] or redis.call('HSTRLEN', record, name))
end
for _, expired in ipairs(redis.call('ZRANGE', OF .. owner, '-inf', now_ms, 'BYSCORE', 'LIMIT', 0, 100)) do
  drop(expired, owner)
end

-- Return the bytes of all owners, and the owner with the most of those that are not in `done`, with the second most.
local function sums(done)
  local total, most, first, second = 0, nil, 0, 0
  local found = redis.call('HGETALL', BYTES)
  for i = 1, #found, 2 do
    local bytes = tonumber(found[i + 1])
    total = total + bytes
    if not done[found[i]] then
      if bytes > first then
        most, first, second = found[i], bytes, first
      else
        second = math.max(second, bytes)
      end
    end
  end
  return total, most, first, second
end

local function may_go(other)
  local status, lease_ms = unpack(redis.call('HMGET', RECORD .. other, 'status', 'lease_ms'))
  local is_generated = (status == 'queued' or status == 'in_progress') and tonumber(lease_ms) > tonumber(now_ms)
  return other ~= id and not is_generated
end

-- Remove responses of other requests until there is room for `bytes` more. Return whether there is.
local function make_room(bytes)
  local done = {}
  while true do
    local total, most, held, next_held = sums(done)
    local need = total + bytes - limit
    if need <= 0 then
      return true
    elseif not most then
      return false
    end
    local ids, goes = redis.call('ZRANGE', OF .. most, 0, 99), 0
    for _, other in ipairs(ids) do
      if need > 0 and held >= next_held and may_go(other) then
        local freed = tonumber(redis.call('HGET', SIZES, other) or 0)
        drop(other, most)
        need, held, goes = need - freed, held - freed, goes + 1
      end
    end
    if #ids == 0 then
      redis.call('HDEL', BYTES, most)  -- somebody has removed what was counted
    end
    done[most] = goes == 0 or nil
  end
end

local old = tonumber(redis.call('HGET', SIZES, id) or 0)
if guard == 'new' and fields.status == 'queued' then
  if sums({}) + size > 2 * limit then
    return -1
  end
elseif guard == 'running' then
  make_room(size - old)
elseif size > limit or not make_room(size - old) then
  return -1
end
for name, value in pairs(fields) do
  redis.call('HSET', record, name, value)
end
redis.call('PEXPIREAT', record, expires_ms)
redis.call('ZADD', OF .. owner, expires_ms, id)
set_size(id, owner, size)
return 1
