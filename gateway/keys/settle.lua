-- End an open request: free the places of its choices, and return the tokens that it had reserved and did not use.
-- The call also has: `tokens` to return (negative: it used more), and the `ids` of the choices.
-- A repeated call changes nothing, nor does one whose request is not open any more.
for i, limits in ipairs(call.holders) do
  local holder = read(limits, KEYS[2 * i - 1], KEYS[2 * i])
  local num_removed = 0
  for _, id in ipairs(call.ids) do
    num_removed = num_removed + redis.call('ZREM', holder.open, id)
  end
  if num_removed > 0 and limits.tokens > 0 then
    holder.level.tokens = holder.level.tokens + call.tokens
    store(holder)
  end
end
