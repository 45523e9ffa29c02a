-- Functions for every script of this folder. Each script gets those in front that it needs, and key names of keys.py
-- (QUEUE, WAITING, REQUEST, OUTPUT, ALONE, CLAIM, LEFT, LEASES, HELD, WAITERS, WAKE, SEQUENCE, EPOCH) and lifetimes. Scripts
-- move requests atomically and make no decisions.
--
-- Redis does not undo writes when a script fails half-way. Scripts therefore check before they write, and skip a
-- request whose hash is missing (because an eviction policy or a person has removed it).

-- More numbers than a server can have given out and lost: those of the longest lag of a replica, and of clocks that
-- differ. They are 60 s of the clock.
local MAX_LOST = 60 * 1000 * 1000

local function replication_id()
  return string.match(redis.call('INFO', 'replication'), 'master_replid:(%x+)') or ''
end

-- Return the first of `count` consecutive numbers, which are all greater than all numbers of which this server knows.
-- They start from the clock in microseconds, so that this also holds when the server has lost all its data.
local function take_numbers(count, now_ms)
  local last = redis.call('INCRBY', SEQUENCE, count)
  if last == count then -- there was none
    last = 1000 * now_ms + count
    redis.call('SET', SEQUENCE, string.format('%.0f', last))
    redis.call('SET', EPOCH, replication_id())
  end
  return last - count + 1
end

-- Return the first of `count` consecutive fences, which are greater than all numbers given out before. A server that has
-- become the primary, or has started again, may have lost its last writes, or be set back in time. Its replication id is
-- a new one then: numbers start from the clock again, and those that may be lost are passed over. To ask for the id costs
-- more than the rest. `known` is the id that is stored.
local function take_fences(count, now_ms, known)
  local epoch = replication_id()
  if epoch ~= known then
    local last = math.max(redis.call('GET', SEQUENCE) or 0, 1000 * now_ms)
    redis.call('SET', SEQUENCE, string.format('%.0f', last + MAX_LOST))
    redis.call('SET', EPOCH, epoch)
  end
  return take_numbers(count, now_ms)
end

-- Make a member of a tier's set. The member contains the request's token counts, so that they can be subtracted from
-- the sums when the member is removed, even if the request's hash is missing.
local function make_member(number, prompt, output, id)
  return string.format('%016.0f:', number) .. prompt .. ':' .. output .. ':' .. id
end

local function read_member(member)
  local prompt, output, id = string.match(member, '^%d+:(%d+):(%d+):(.*)$')
  return tonumber(prompt), tonumber(output), id
end

-- Return the bytes of a request in the store, as they are limited.
local function size_of(id)
  return redis.call('HSTRLEN', REQUEST .. id, 'payload')
end

-- Compute a tier's sums from its members. This is needed when the hash of the sums is missing, or has no bytes.
local function recount(tier)
  local prompt, output, bytes = 0, 0, 0
  for _, member in ipairs(redis.call('ZRANGE', QUEUE .. tier, 0, -1)) do
    local p, o, id = read_member(member)
    prompt, output, bytes = prompt + p, output + o, bytes + size_of(id)
  end
  redis.call('HSET', WAITING .. tier, 'prompt', prompt, 'output', output, 'bytes', bytes)
  return prompt, output, bytes
end

-- Return the prompt tokens, output tokens and bytes of the `depth` requests that wait in a tier, and when one of these puts
-- has woken a worker (in ms, 0: never).
local function waiting(tier, depth)
  if depth == 0 then
    return 0, 0, 0, 0
  end
  local prompt, output, bytes, woken_ms = unpack(redis.call('HMGET', WAITING .. tier, 'prompt', 'output', 'bytes', 'woken_ms'))
  if not bytes then
    prompt, output, bytes = recount(tier)
  end
  return tonumber(prompt), tonumber(output), tonumber(bytes), tonumber(woken_ms or 0)
end

-- Change the sums of a tier after its set has changed. When the tier is empty (`is_empty` may say so), the hash of the sums
-- is deleted, so that an error in the sums cannot last. Return whether requests wait in the tier.
local function count_waiting(tier, prompt, output, bytes, is_empty)
  local key = WAITING .. tier
  if is_empty or redis.call('EXISTS', QUEUE .. tier) == 0 then
    redis.call('DEL', key)
    return false
  end
  local sums = redis.call('HMGET', key, 'prompt', 'output', 'bytes')
  if sums[3] then
    redis.call('HSET', key, 'prompt', sums[1] + prompt, 'output', sums[2] + output, 'bytes', sums[3] + bytes)
  else
    recount(tier)
  end
  return true
end

local function holds(id, fence)
  return redis.call('HGET', REQUEST .. id, 'fence') == fence
end

-- Return the id of the worker of a `<worker id>#<incarnation>`.
local function id_of(holder)
  return string.match(holder, '^[^#]*')
end

-- Wake the least busy worker that waits for a tier. Whoever claims and leaves some of a tier wakes the next one, so one
-- at a time is enough. A worker that has ended does not listen.
local function wake(tier)
  repeat
    local waiter = redis.call('ZPOPMIN', WAITERS .. tier)[1]
  until not waiter or redis.call('PUBLISH', WAKE .. waiter, 'wake') > 0
end

-- Run a command for many members of one key. `unpack` takes a few thousand at most.
local function for_members(command, key, members)
  for i = 1, #members, 1000 do
    redis.call(command, key, unpack(members, i, math.min(i + 999, #members)))
  end
end

-- Remove a request from the sets of leases, while its hash still says who holds it. Return its holder, if it was leased.
local function end_lease(id)
  local holder = redis.call('HGET', REQUEST .. id, 'worker')
  if holder then
    redis.call('SREM', HELD .. id_of(holder), id)
  end
  return redis.call('ZREM', LEASES, id) == 1 and holder
end

-- Return the key of a request's stored output, and the number of the request's put in 16 digits. The output begins with the
-- number of the request that may append to it.
local function output_of(id)
  local fields = redis.call('HMGET', REQUEST .. id, 'part', 'member')
  return OUTPUT .. (fields[1] or id), string.sub(fields[2], 1, 16)
end

local function writer_of(key)
  return redis.call('GETRANGE', key, 0, 15)
end

-- Return the stored output of a request that is claimed. From now on, no request that was put earlier appends to it.
local function take_output(key, number)
  local output = redis.call('GET', key)
  if output and string.sub(output, 1, 16) < number then
    redis.call('SETRANGE', key, 0, number)
  end
  return output
end

-- Forget a request and its output; `part` and `member` are fields of its hash. The output of a part of a job stays for a
-- while, and nobody may append to it.
local function forget(id, part, member)
  if not part then
    redis.call('DEL', REQUEST .. id, OUTPUT .. id)
    return
  end
  redis.call('DEL', REQUEST .. id)
  local key, number = OUTPUT .. part, string.sub(member, 1, 16)
  if writer_of(key) == number then
    redis.call('SETRANGE', key, 0, string.rep('0', #number))
    redis.call('PEXPIRE', key, PART_TTL_MS)
  end
end

-- Move a request from the sets of leases back to its old place in its tier's set, and wake a worker. No limit is checked:
-- the request was admitted before.
local function give_back(id)
  local key = REQUEST .. id
  local fields = redis.call('HMGET', key, 'tier', 'deadline_ms', 'member')
  end_lease(id)
  if not fields[1] then
    return false
  end
  redis.call('HDEL', key, 'fence', 'worker', 'waits')
  if redis.call('ZADD', QUEUE .. fields[1], fields[2], fields[3]) == 1 then
    local prompt, output = read_member(fields[3])
    count_waiting(fields[1], prompt, output, size_of(id))
  end
  wake(fields[1])
  return true
end

-- Return whether the death of its worker counts as an attempt at a request. If a request ran alone, only its attempt
-- counts; otherwise the attempts at all requests count that the worker has not marked as waiting.
local function counts(id)
  local fields = redis.call('HMGET', REQUEST .. id, 'worker', 'waits')
  local alone = fields[1] and redis.call('GET', ALONE .. fields[1])
  if alone then
    return alone == id
  end
  return fields[2] ~= '1'
end

-- Give back the requests of dead workers.
local function give_back_all(ids)
  local moved = {}
  for _, id in ipairs(ids) do
    local change = counts(id) and 0 or -1
    if give_back(id) then
      redis.call('HINCRBY', REQUEST .. id, 'attempt', change)
      moved[#moved + 1] = id
    end
  end
  return moved
end
