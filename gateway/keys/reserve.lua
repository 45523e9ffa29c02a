-- Take one request and some tokens from the buckets of all holders, charge their budgets, and take places for the
-- request's choices: all of this or nothing.
-- KEYS, after those of buckets.lua: what is spent today and this month (hashes).
-- The call also has:
--   takes: false if it is only to be checked that something is left
--   charges: whether any holder has a budget; then all that the holders spend is charged
--   tokens, cost: what the request reserves
--   ids: of the choices, if any; lease_ms: until their places expire; spent_s: until what is spent expires
--   and for each holder `spender`, its name in the hashes, and `budget`: tokens and cost of the day, then of the month
--   (0: no budget).
-- Returns 'ok', or 'open', 'requests', 'tokens', 'tokens_per_day', 'cost_per_day', … (what is lacking); the number of the
-- holder that lacks it (0: none); what is left of its budget; and the levels of requests and tokens of each holder, as
-- texts. A repeated call with the ids of an open request takes nothing.
local ids, first = call.ids, call.ids[1]
local spent = {KEYS[#KEYS - 1], KEYS[#KEYS]}
local periods = {'day', 'month'}
local holders = {}
for i, limits in ipairs(call.holders) do
  holders[i] = read(limits, KEYS[2 * i - 1], KEYS[2 * i])
end

local function answer(lacking, number, left)
  local found = {lacking, number, string.format('%.0f', left)}
  for _, holder in ipairs(holders) do
    table.insert(found, string.format('%.3f', holder.level.requests))
    table.insert(found, string.format('%.3f', holder.level.tokens))
  end
  return found
end

if first and redis.call('ZSCORE', holders[1].open, first) then
  return answer('ok', 0, 0)
end
for i, holder in ipairs(holders) do
  local limits = call.holders[i]
  if first then
    redis.call('ZREMRANGEBYSCORE', holder.open, '-inf', now_ms)
    redis.call('ZREMRANGEBYSCORE', holder.open, now_ms + 2 * call.lease_ms, '+inf')  -- from before a clock was set back
    if limits.open > 0 and redis.call('ZCARD', holder.open) + #ids > limits.open then
      return answer('open', i, 0)
    end
  end
  for p, period in ipairs(periods) do
    for _, unit in ipairs({'tokens', 'cost'}) do
      local budget = limits.budget[p][unit]
      if budget > 0 then
        local left = budget - tonumber(redis.call('HGET', spent[p], limits.spender .. ':' .. unit) or 0)
        if left < math.max(1, call[unit]) then
          return answer(unit .. '_per_' .. period, i, left)
        end
      end
    end
  end
  if limits.requests > 0 and holder.level.requests < 1 then
    return answer('requests', i, 0)
  end
  if limits.tokens > 0 and call.tokens > 0 and holder.level.tokens < call.tokens then
    return answer('tokens', i, 0)
  end
end

if not call.takes then
  return answer('ok', 0, 0)
end
for i, holder in ipairs(holders) do
  holder.level.requests = holder.level.requests - 1
  holder.level.tokens = holder.level.tokens - call.tokens
  store(holder)
  for _, id in ipairs(ids) do
    redis.call('ZADD', holder.open, now_ms + call.lease_ms, id)
  end
  if first then
    redis.call('PEXPIRE', holder.open, call.lease_ms)
  end
  for p in ipairs(periods) do
    for _, unit in ipairs({'tokens', 'cost'}) do
      if call.charges and call[unit] > 0 then
        redis.call('HINCRBY', spent[p], call.holders[i].spender .. ':' .. unit, string.format('%.0f', call[unit]))
        redis.call('EXPIRE', spent[p], call.spent_s)
      end
    end
  end
end
return answer('ok', 0, 0)
