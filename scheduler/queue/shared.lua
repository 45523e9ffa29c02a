-- Functions for every script of this folder. This file is put in front of each script, after the key names of keys.py
-- (QUEUE, WAITING, REQUEST, OUTPUT, ALONE, CLAIM, LEASES, HELD, WAITERS, WAKE, SEQUENCE, EPOCH) and lifetimes. Scripts
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

-- Return the first of `count` consecutive fences, which are greater than all numbers given out before. Numbers start
-- from the clock in microseconds, so that this also holds when the server has lost all its data. A server that has become
-- the primary, or has started again, may have lost its last writes. Its replication id is a new one then, and the numbers
-- that may be lost are passed over. To ask for the id costs more than the rest.
local function take_fences(count, now_ms)
  local epoch, known = replication_id(), redis.call('GET', EPOCH)
  if epoch ~= known then
    redis.call('SET', EPOCH, epoch)
  end
  return take_numbers(count, now_ms, known and epoch ~= known and MAX_LOST)
end

-- Make a member of a tier's set. The member contains the request's token counts, so that they can be subtracted from
-- the sums when the member is removed, even if the request's hash is missing.
local function make_member(number, prompt, output, id)
  return string.format('%016.0f:%.0f:%.0f:', number, prompt, output) .. id
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
end

-- Change the sums of a tier after its set has changed. When the tier is empty, the hash of the sums is deleted, so that
-- an error in the sums cannot last.
local function count_waiting(tier, prompt, output, bytes)
  local key = WAITING .. tier
  if redis.call('EXISTS', QUEUE .. tier) == 0 then
    redis.call('DEL', key)
  elseif redis.call('HEXISTS', key, 'bytes') == 0 then
    recount(tier)
  else
    redis.call('HINCRBY', key, 'prompt', prompt)
    redis.call('HINCRBY', key, 'output', output)
    redis.call('HINCRBY', key, 'bytes', bytes)
  end
end

-- Return the prompt tokens, output tokens and bytes of the `depth` requests that wait in a tier, and when one of these puts
-- has woken a worker (in ms, 0: never).
local function waiting(tier, depth)
  if depth == 0 then
    return 0, 0, 0, 0
  end
  local sums = redis.call('HMGET', WAITING .. tier, 'prompt', 'output', 'bytes', 'woken_ms')
  if not sums[3] then
    recount(tier)
    sums = redis.call('HMGET', WAITING .. tier, 'prompt', 'output', 'bytes', 'woken_ms')
  end
  return tonumber(sums[1]), tonumber(sums[2]), tonumber(sums[3]), tonumber(sums[4] or 0)
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

-- Remove a request from the sets of leases, while its hash still says who holds it. Return its holder, if it was leased.
local function end_lease(id)
  local holder = redis.call('HGET', REQUEST .. id, 'worker')
  if holder then
    redis.call('SREM', HELD .. id_of(holder), id)
  end
  return redis.call('ZREM', LEASES, id) == 1 and holder
end

-- Return the key of a request's stored output, the number of the request's put in 16 digits, and whether the request is
-- a part of a job. The output begins with the number of the request that may append to it.
local function output_of(id)
  local fields = redis.call('HMGET', REQUEST .. id, 'part', 'member')
  return OUTPUT .. (fields[1] or id), string.sub(fields[2], 1, 16), fields[1] and true
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

-- Forget a request with its lease and its output. The output of a part of a job stays for a while, and nobody may append
-- to it. Return the request's holder, if it was leased.
local function forget(id)
  local holder = end_lease(id)
  local key, number, is_part = output_of(id)
  redis.call('DEL', REQUEST .. id)
  if not is_part then
    redis.call('DEL', key)
  elseif writer_of(key) == number then
    redis.call('SETRANGE', key, 0, string.rep('0', #number))
    redis.call('PEXPIRE', key, PART_TTL_MS)
  end
  return holder
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
